// Compiled only where the build finds NCCL's header: our declarations against the real ones.
#include <nccl.h>

#include <type_traits>

#include "nccl_api.h"

namespace ours = rollpacker::nccl;

static_assert(sizeof(ours::UniqueId) == sizeof(ncclUniqueId) && alignof(ours::UniqueId) == alignof(ncclUniqueId));
static_assert(sizeof(ours::Result) == sizeof(ncclResult_t) && ours::kSuccess == ncclSuccess);
static_assert(sizeof(int) == sizeof(ncclDataType_t) && ours::kBytes == ncclUint8);
static_assert(sizeof(ours::Communicator) == sizeof(ncclComm_t) && sizeof(ours::Stream) == sizeof(cudaStream_t));
static_assert(std::is_same_v<decltype(ncclGetUniqueId), ncclResult_t(ncclUniqueId*)>);
static_assert(std::is_same_v<decltype(ncclCommInitRank), ncclResult_t(ncclComm_t*, int, ncclUniqueId, int)>);
static_assert(std::is_same_v<decltype(ncclCommDestroy), ncclResult_t(ncclComm_t)>);
static_assert(std::is_same_v<decltype(ncclGetErrorString), const char*(ncclResult_t)>);
static_assert(std::is_same_v<decltype(ncclGroupStart), ncclResult_t()>);
static_assert(std::is_same_v<decltype(ncclGroupEnd), ncclResult_t()>);
static_assert(std::is_same_v<decltype(ncclSend),
                             ncclResult_t(const void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t)>);
static_assert(
    std::is_same_v<decltype(ncclRecv), ncclResult_t(void*, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t)>);

// NCCL without NCCL: found by dlopen at run time, so that building and importing need neither the library nor a GPU.
//
// The declarations are those of NCCL's C ABI since 2.7 (grouped send and receive); nccl_abi_check.cpp compares them with nccl.h
// where the build finds one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "rounds.h"

namespace rollpacker::nccl {

struct UniqueId {
  char bytes[128];
};
using Communicator = struct ncclComm*;
using Stream = void*;
using Result = int;
constexpr Result kSuccess = 0;
constexpr int kBytes = 1;  // ncclUint8

struct Library {
  Result (*GetUniqueId)(UniqueId*);
  Result (*CommInitRank)(Communicator*, int, UniqueId, int);
  Result (*CommDestroy)(Communicator);
  const char* (*GetErrorString)(Result);
  Result (*GroupStart)();
  Result (*GroupEnd)();
  Result (*Send)(const void*, size_t, int, int, Communicator, Stream);
  Result (*Recv)(void*, size_t, int, int, Communicator, Stream);
};

// Loads on the first call: `path` if one is given, else the libnccl.so.2 that the process has (torch's), else the loader's.
// Throws std::runtime_error with the loader's reasons.
const Library& library(const std::string& path = "");

// Throws std::runtime_error with NCCL's text unless `result` is success.
void check(Result result, const char* call);

// The messages of one round as one group, on `stream`.
void exchange(Communicator communicator, Stream stream, const Message* messages, int64_t num_messages, char* send_buffer,
              char* receive_buffer);

}  // namespace rollpacker::nccl

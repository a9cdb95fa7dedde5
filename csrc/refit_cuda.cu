#include "refit_cuda.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace rollpacker {
namespace {

constexpr int kLanes = 256;
constexpr int64_t kMaxBlocks = 4096;  // some 30 for each multiprocessor; each takes the tiles a grid apart

void check(cudaError_t error, const char* call) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string(call) + ": " + cudaGetErrorName(error) + ", " + cudaGetErrorString(error));
}

template <class From, class To>
__global__ void __launch_bounds__(kLanes)
    copy_kernel(const Segment* segments, const int64_t* tile_begin, int64_t n, int64_t source_base, int64_t destination_base,
                int64_t first_tile, int64_t num_tiles) {
  for (int64_t i = blockIdx.x; i < num_tiles; i += gridDim.x)
    copy_tile<From, To>(segments, tile_begin, n, source_base, destination_base, first_tile + i, threadIdx.x, blockDim.x);
}

// A table on the device, and on the host the first tile of each round.
class DeviceTable {
 public:
  explicit DeviceTable(const Table& host) : from_(host.from), to_(host.to) {
    const int64_t num_rounds = host.num_rounds, size = host.bounds[num_rounds];
    bounds_.assign(host.bounds, host.bounds + num_rounds + 1);
    for (int64_t bound : bounds_) first_tiles_.push_back(host.tile_begin[bound]);
    if (size == 0) return;
    const size_t segment_bytes = static_cast<size_t>(size) * sizeof(Segment);
    const size_t tile_bytes = static_cast<size_t>(size + 1) * sizeof(int64_t);
    check(cudaMalloc(&segments_, segment_bytes), "cudaMalloc");
    check(cudaMalloc(&tile_begin_, tile_bytes), "cudaMalloc");
    check(cudaMemcpy(segments_, host.segments, segment_bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
    check(cudaMemcpy(tile_begin_, host.tile_begin, tile_bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  }
  ~DeviceTable() {
    cudaFree(segments_);
    cudaFree(tile_begin_);
  }
  DeviceTable(const DeviceTable&) = delete;
  DeviceTable& operator=(const DeviceTable&) = delete;

  void launch(int64_t round, int64_t source_base, int64_t destination_base, void* stream) const {
    const int64_t first = bounds_[round], last = bounds_[round + 1];
    const Batch batch{segments_ + first, tile_begin_ + first, last - first, from_, to_, source_base, destination_base};
    launch_copy(batch, first_tiles_[round], first_tiles_[round + 1] - first_tiles_[round], stream);
  }

 private:
  DType from_, to_;
  std::vector<int64_t> bounds_, first_tiles_;
  Segment* segments_ = nullptr;
  int64_t* tile_begin_ = nullptr;
};

// Device of run_rounds(): every call enqueues and returns.
struct Streams {
  const DeviceTable &pack_table, &local_table, &unpack_table;
  const std::vector<Message>& messages;
  const std::vector<int64_t>& message_bounds;
  nccl::Communicator communicator;
  cudaStream_t copies, transfers;
  cudaEvent_t (&packed)[2], (&exchanged)[2];
  const int64_t (&send_buffers)[2], (&receive_buffers)[2];

  void pack(int64_t k) { pack_table.launch(k, 0, send_buffers[k % 2], copies); }
  void copy_local(int64_t k) { local_table.launch(k, 0, 0, copies); }
  void unpack(int64_t k) { unpack_table.launch(k, receive_buffers[k % 2], 0, copies); }

  // After the packing of round k, and so after the unpacking of round k - 2 out of the same buffer.
  void start_exchange(int64_t k) {
    check(cudaEventRecord(packed[k % 2], copies), "cudaEventRecord");
    check(cudaStreamWaitEvent(transfers, packed[k % 2], 0), "cudaStreamWaitEvent");
    const int64_t first = message_bounds[k], last = message_bounds[k + 1];
    if (first < last)
      nccl::exchange(communicator, transfers, messages.data() + first, last - first,
                     reinterpret_cast<char*>(send_buffers[k % 2]), reinterpret_cast<char*>(receive_buffers[k % 2]));
    check(cudaEventRecord(exchanged[k % 2], transfers), "cudaEventRecord");
  }
  void finish_exchange(int64_t k) { check(cudaStreamWaitEvent(copies, exchanged[k % 2], 0), "cudaStreamWaitEvent"); }
};

}  // namespace

int num_cuda_devices() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

void launch_copy(const Batch& batch, int64_t first_tile, int64_t num_tiles, void* stream) {
  if (num_tiles == 0) return;
  with_types(batch.from, batch.to, [&](auto from, auto to) {
    const auto blocks = static_cast<unsigned>(std::min(num_tiles, kMaxBlocks));
    copy_kernel<decltype(from), decltype(to)><<<blocks, kLanes, 0, static_cast<cudaStream_t>(stream)>>>(
        batch.segments, batch.tile_begin, batch.size, batch.source_base, batch.destination_base, first_tile, num_tiles);
    check(cudaGetLastError(), "copy_kernel");
  });
}

struct CudaRefit::State {
  DeviceTable pack, local, unpack;
  std::vector<Message> messages;
  std::vector<int64_t> message_bounds;
  nccl::Communicator communicator;
  cudaStream_t transfers = nullptr;
  cudaEvent_t packed[2] = {}, exchanged[2] = {};

  State(const Table& pack_table, const Table& local_table, const Table& unpack_table, std::vector<Message> all_messages,
        std::vector<int64_t> bounds, nccl::Communicator comm)
      : pack(pack_table),
        local(local_table),
        unpack(unpack_table),
        messages(std::move(all_messages)),
        message_bounds(std::move(bounds)),
        communicator(comm) {
    check(cudaStreamCreateWithFlags(&transfers, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    for (auto* events : {&packed, &exchanged})
      for (cudaEvent_t& event : *events)
        check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
  }
  ~State() {
    for (auto* events : {&packed, &exchanged})
      for (cudaEvent_t event : *events)
        if (event != nullptr) cudaEventDestroy(event);
    if (transfers != nullptr) cudaStreamDestroy(transfers);
  }
};

CudaRefit::CudaRefit(const Table& pack, const Table& local, const Table& unpack, std::vector<Message> messages,
                     std::vector<int64_t> message_bounds, nccl::Communicator communicator)
    : state_(new State(pack, local, unpack, std::move(messages), std::move(message_bounds), communicator)) {}

CudaRefit::~CudaRefit() { delete state_; }

void CudaRefit::run(const int64_t (&send_buffers)[2], const int64_t (&receive_buffers)[2], void* stream) {
  State& s = *state_;
  Streams device{s.pack,         s.local,     s.unpack, s.messages,  s.message_bounds, s.communicator,
                 static_cast<cudaStream_t>(stream), s.transfers, s.packed, s.exchanged, send_buffers,
                 receive_buffers};
  run_rounds(device, static_cast<int64_t>(s.message_bounds.size()) - 1);
}

}  // namespace rollpacker

// The refit on a GPU: copies on the caller's stream, NCCL on one of its own, events between them and no wait of the host.
#pragma once

#include <vector>

#include "nccl_api.h"
#include "rounds.h"

namespace rollpacker {

// Number of CUDA devices; 0 without a driver.
int num_cuda_devices();

// Copies one batch whose arrays and segments are in device memory. Tile numbers come from the host: nothing waits.
void launch_copy(const Batch& batch, int64_t first_tile, int64_t num_tiles, void* stream);

class CudaRefit {
 public:
  // Tables are host arrays and are copied to the device; `message_bounds` has one entry more than there are rounds.
  CudaRefit(const Table& pack, const Table& local, const Table& unpack, std::vector<Message> messages,
            std::vector<int64_t> message_bounds, nccl::Communicator communicator);
  ~CudaRefit();
  CudaRefit(const CudaRefit&) = delete;
  CudaRefit& operator=(const CudaRefit&) = delete;

  // Enqueues a whole refit: what is enqueued on `stream` later sees all of it. The buffers must live until then.
  void run(const int64_t (&send_buffers)[2], const int64_t (&receive_buffers)[2], void* stream);

 private:
  struct State;
  State* state_;
};

}  // namespace rollpacker

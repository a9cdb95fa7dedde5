// The order of a refit, for every device: rounds of pack, exchange and unpack with two buffers for each direction.
//
// While round k travels, round k - 1 is unpacked and a share of what stays on the device is copied. Buffer k % 2 is packed
// again in round k + 2, after finish_exchange(k) has been called: that call must order everything enqueued later on the device
// behind the exchange (CUDA: an event), or have waited for it (MPI).
#pragma once

#include <cstdint>

#include "batch.h"

namespace rollpacker {

// Segments of all rounds; round k has those from bounds[k] on, up to bounds[k + 1].
struct Table {
  const Segment* segments;
  const int64_t* tile_begin;
  const int64_t* bounds;
  int64_t num_rounds;
  DType from, to;

  Batch round(int64_t k, int64_t source_base, int64_t destination_base) const {
    return Batch{segments + bounds[k], tile_begin + bounds[k],     bounds[k + 1] - bounds[k], from, to,
                 source_base,          destination_base};
  }
};

// One side of a transfer of one round; bytes in the buffer of that round.
struct Message {
  int64_t peer, is_send, offset, size;
};
constexpr int kMessageFields = 4;
static_assert(sizeof(Message) == kMessageFields * sizeof(int64_t), "a message is a row of an int64 table");

template <class Device>
void run_rounds(Device& device, int64_t num_rounds) {
  for (int64_t k = 0; k < num_rounds; ++k) {
    device.pack(k);
    device.start_exchange(k);
    device.copy_local(k);
    if (k > 0) {
      device.finish_exchange(k - 1);
      device.unpack(k - 1);
    }
  }
  device.finish_exchange(num_rounds - 1);
  device.unpack(num_rounds - 1);
}

}  // namespace rollpacker

// The CPU's two ways to copy a batch.
#pragma once

#include "batch.h"

namespace rollpacker {

// Past the cache a store need not fetch the line that it overwrites: for what nobody reads before much else has been written.
enum class Stores { kCached, kPastCache };

// Run by run, memcpy (or the same past the cache) where the types are equal, tiles shared out among threads.
void copy_cpu(const Batch& batch, int threads, Stores stores = Stores::kCached);

// The CUDA kernel's body, lane by lane on this thread: slow, for tests.
void copy_emulated(const Batch& batch, int lanes);

}  // namespace rollpacker

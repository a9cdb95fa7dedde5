// The CPU's two ways to copy a batch.
#pragma once

#include "batch.h"

namespace rollpacker {

// Run by run, memcpy where the types are equal, tiles shared out among threads.
void copy_cpu(const Batch& batch, int threads);

// The CUDA kernel's body, lane by lane on this thread: slow, for tests.
void copy_emulated(const Batch& batch, int lanes);

}  // namespace rollpacker

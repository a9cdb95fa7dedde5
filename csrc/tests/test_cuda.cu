// What only a GPU can show: the kernel equals the CPU's copy, a refit of several rounds over NCCL with one rank arrives whole,
// and its speed against the device's own copy. Exit code 77 (skipped) without a device; --kernels-only leaves NCCL and speed out
// (for compute-sanitizer).
#include <cuda_runtime.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>

#include "check.h"
#include "copy_cpu.h"
#include "random_table.h"
#include "refit_cuda.h"

using namespace rollpacker;

namespace {

#define CUDA(call) CHECK((call) == cudaSuccess)

// Device memory with the bytes of a host array.
class OnDevice {
 public:
  OnDevice(const void* host, size_t size) : size_(size) {
    CUDA(cudaMalloc(&data_, size));
    CUDA(cudaMemcpy(data_, host, size, cudaMemcpyHostToDevice));
  }
  ~OnDevice() { cudaFree(data_); }
  OnDevice(const OnDevice&) = delete;
  char* data() const { return static_cast<char*>(data_); }
  int64_t address() const { return reinterpret_cast<int64_t>(data_); }
  std::vector<char> read() const {
    std::vector<char> host(size_);
    CUDA(cudaMemcpy(host.data(), data_, size_, cudaMemcpyDeviceToHost));
    return host;
  }

 private:
  size_t size_;
  void* data_ = nullptr;
};

const DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

void test_kernel_equals_threads() {
  std::mt19937_64 random(11);
  for (int round = 0; round < 10; ++round)
    for (DType from : kDTypes)
      for (DType to : kDTypes) {
        const RandomTable table(random, from, to, 20);
        const std::vector<char> source = random_numbers(random, from, table.source_elements);
        std::vector<char> expected(static_cast<size_t>(table.destination_elements * size_of(to)), 1);
        const OnDevice segments(table.segments.data(), table.segments.size() * sizeof(Segment));
        const OnDevice tiles(table.tile_begin.data(), table.tile_begin.size() * sizeof(int64_t));
        const OnDevice input(source.data(), source.size()), output(expected.data(), expected.size());
        Batch batch = table.batch(input.data(), output.data(), from, to);
        batch.segments = reinterpret_cast<const Segment*>(segments.data());
        batch.tile_begin = reinterpret_cast<const int64_t*>(tiles.data());
        launch_copy(batch, 0, table.tile_begin.back(), nullptr);
        copy_cpu(table.batch(source.data(), expected.data(), from, to), 2);
        CHECK(output.read() == expected);
      }
}

// A matrix goes to the same rank in six rounds: packed with a pitch, sent to itself, unpacked with another.
void test_rounds_over_nccl() {
  constexpr int64_t rounds = 6, row = 1024, rows = 600, per_round = row * rows / rounds, pitch = row + 8;
  std::vector<uint16_t> numbers(static_cast<size_t>(rows * pitch));
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<uint16_t>(i * 2654435761u >> 7);
  const OnDevice source(numbers.data(), numbers.size() * 2), destination(numbers.data(), numbers.size() * 2);
  CUDA(cudaMemset(destination.data(), 0, numbers.size() * 2));
  std::vector<Segment> packs, unpacks;
  std::vector<int64_t> tiles{0}, bounds{0}, no_tiles{0}, no_bounds(rounds + 1, 0);
  std::vector<Message> messages;
  std::vector<int64_t> message_bounds{0};
  for (int64_t k = 0; k < rounds; ++k) {
    const int64_t begin = k * per_round, end = begin + per_round;
    packs.push_back(Segment{source.address(), -begin * 2, row, pitch, row, begin, end});
    unpacks.push_back(Segment{-begin * 2, destination.address(), row, row, pitch, begin, end});
    tiles.push_back(tiles.back() + num_tiles(packs.back()));
    bounds.push_back(k + 1);
    messages.push_back(Message{0, 1, 0, per_round * 2});
    messages.push_back(Message{0, 0, 0, per_round * 2});
    message_bounds.push_back(static_cast<int64_t>(messages.size()));
  }
  nccl::UniqueId id{};
  nccl::Communicator communicator = nullptr;
  nccl::check(nccl::library().GetUniqueId(&id), "ncclGetUniqueId");
  nccl::check(nccl::library().CommInitRank(&communicator, 1, id, 0), "ncclCommInitRank");
  {
    const DType type = DType::kBFloat16;
    CudaRefit refit(Table{packs.data(), tiles.data(), bounds.data(), rounds, type, type},
                    Table{nullptr, no_tiles.data(), no_bounds.data(), rounds, type, type},
                    Table{unpacks.data(), tiles.data(), bounds.data(), rounds, type, type}, messages, message_bounds,
                    communicator);
    const std::vector<char> zeros(per_round * 2);
    const OnDevice a(zeros.data(), zeros.size()), b(zeros.data(), zeros.size()), c(zeros.data(), zeros.size()),
        d(zeros.data(), zeros.size());
    cudaStream_t stream = nullptr;
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    for (int repeat = 0; repeat < 3; ++repeat) refit.run({a.address(), b.address()}, {c.address(), d.address()}, stream);
    CUDA(cudaStreamSynchronize(stream));
    CUDA(cudaStreamDestroy(stream));
  }
  const std::vector<char> bytes = destination.read();
  const auto* arrived = reinterpret_cast<const uint16_t*>(bytes.data());
  for (int64_t i = 0; i < rows * pitch; ++i) CHECK(arrived[i] == (i % pitch < row ? numbers[static_cast<size_t>(i)] : 0));
  nccl::check(nccl::library().CommDestroy(communicator), "ncclCommDestroy");
}

template <class F>
double gigabytes_per_s(int64_t bytes, F f) {
  cudaEvent_t start, stop;
  CUDA(cudaEventCreate(&start));
  CUDA(cudaEventCreate(&stop));
  f();
  CUDA(cudaEventRecord(start));
  for (int i = 0; i < 10; ++i) f();
  CUDA(cudaEventRecord(stop));
  CUDA(cudaEventSynchronize(stop));
  float ms = 0;
  CUDA(cudaEventElapsedTime(&ms, start, stop));
  CUDA(cudaEventDestroy(start));
  CUDA(cudaEventDestroy(stop));
  return 10 * static_cast<double>(bytes) / (ms * 1e6);
}

// Packing the columns of a TP shard (rows of 2,368 bf16 out of 4,736) against cudaMemcpy of as many bytes.
void print_speed() {
  constexpr int64_t row = 2368, rows = 40000, bytes = row * rows * 2;
  const std::vector<char> zeros(static_cast<size_t>(2 * bytes));
  const OnDevice matrix(zeros.data(), zeros.size()), packed(zeros.data(), static_cast<size_t>(bytes));
  const Segment segment{0, 0, row, 2 * row, row, 0, row * rows};
  const int64_t host_tiles[] = {0, num_tiles(segment)};
  const OnDevice segments(&segment, sizeof segment), tiles(host_tiles, sizeof host_tiles);
  const Batch batch{reinterpret_cast<const Segment*>(segments.data()), reinterpret_cast<const int64_t*>(tiles.data()), 1,
                    DType::kBFloat16, DType::kBFloat16, matrix.address(), packed.address()};
  const double ours = gigabytes_per_s(bytes, [&] { launch_copy(batch, 0, host_tiles[1], nullptr); });
  const double theirs = gigabytes_per_s(
      bytes, [&] { CUDA(cudaMemcpyAsync(packed.data(), matrix.data(), bytes, cudaMemcpyDeviceToDevice)); });
  std::printf("pack %.0f GB/s, cudaMemcpy %.0f GB/s, ratio %.2f\n", ours, theirs, ours / theirs);
}

}  // namespace

int main(int argc, char** argv) {
  if (num_cuda_devices() == 0) {
    std::puts("no CUDA device: skipped");
    return 77;
  }
  test_kernel_equals_threads();
  if (argc > 1 && std::string(argv[1]) == "--kernels-only") return 0;
  print_speed();
  test_rounds_over_nccl();
  return 0;
}

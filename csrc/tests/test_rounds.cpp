// The rounds of a refit on four ranks that are threads, over a fake NCCL: every byte arrives, in the order that is promised.
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "copy_cpu.h"
#include "nccl_api.h"

using namespace rollpacker;

namespace {

struct Recorder {
  std::vector<std::string> calls;
  void note(const char* name, int64_t k) { calls.push_back(name + std::to_string(k)); }
  void pack(int64_t k) { note("pack", k); }
  void start_exchange(int64_t k) { note("start", k); }
  void copy_local(int64_t k) { note("local", k); }
  void finish_exchange(int64_t k) { note("finish", k); }
  void unpack(int64_t k) { note("unpack", k); }
};

void test_order() {
  Recorder three, one;
  run_rounds(three, 3);
  CHECK((three.calls == std::vector<std::string>{"pack0", "start0", "local0", "pack1", "start1", "local1", "finish0", "unpack0",
                                                 "pack2", "start2", "local2", "finish1", "unpack1", "finish2", "unpack2"}));
  run_rounds(one, 1);
  CHECK((one.calls == std::vector<std::string>{"pack0", "start0", "local0", "finish0", "unpack0"}));
}

constexpr int kRanks = 4;
constexpr int64_t kRounds = 5, kRow = 6, kPitch = 9, kRowsPerRound = 7;
constexpr int64_t kPerRound = kRow * kRowsPerRound;

// Every rank has a matrix for each rank, kRow of each kPitch columns of which go there, as bf16, a few rows in each round.
struct Rank {
  int rank;
  nccl::Communicator communicator;
  std::vector<float> source, destination;
  std::vector<Segment> packs, unpacks, locals;
  std::vector<int64_t> pack_tiles{0}, unpack_tiles{0}, local_tiles{0}, bounds{0}, local_bounds{0};
  std::vector<std::vector<Message>> messages;
  std::vector<char> send[2], receive[2];

  explicit Rank(int number, const nccl::UniqueId& id) : rank(number) {
    nccl::check(nccl::library().CommInitRank(&communicator, kRanks, id, rank), "ncclCommInitRank");
    const int64_t matrix = kRounds * kRowsPerRound * kPitch;
    source.resize(kRanks * matrix);
    destination.assign(source.size(), -1.0f);
    for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<float>((rank * 31 + i) % 251);
    for (int side = 0; side < 2; ++side) {
      send[side].resize(kRanks * kPerRound * 2);
      receive[side].resize(kRanks * kPerRound * 2);
    }
    for (int64_t k = 0; k < kRounds; ++k) add_round(k, matrix);
  }
  ~Rank() { nccl::library().CommDestroy(communicator); }

  void add_round(int64_t k, int64_t matrix) {
    const int64_t begin = k * kPerRound, end = begin + kPerRound, bytes = kPerRound * 2;
    messages.emplace_back();
    for (int64_t peer = 0; peer < kRanks; ++peer) {
      const int64_t there = reinterpret_cast<int64_t>(source.data() + peer * matrix);
      const int64_t here = reinterpret_cast<int64_t>(destination.data() + peer * matrix);
      if (peer == rank) {
        add(locals, local_tiles, Segment{there, here, kRow, kPitch, kPitch, begin, end});
        continue;
      }
      const int64_t offset = peer * bytes;
      add(packs, pack_tiles, Segment{there, offset - begin * 2, kRow, kPitch, kRow, begin, end});
      add(unpacks, unpack_tiles, Segment{offset - begin * 2, here, kRow, kRow, kPitch, begin, end});
      messages.back().push_back(Message{peer, 1, offset, bytes});
      messages.back().push_back(Message{peer, 0, offset, bytes});
    }
    bounds.push_back(static_cast<int64_t>(packs.size()));
    local_bounds.push_back(static_cast<int64_t>(locals.size()));
  }
  static void add(std::vector<Segment>& segments, std::vector<int64_t>& tiles, Segment s) {
    segments.push_back(s);
    tiles.push_back(tiles.back() + num_tiles(s));
  }

  void pack(int64_t k) {
    const Table table{packs.data(), pack_tiles.data(), bounds.data(), kRounds, DType::kFloat32, DType::kBFloat16};
    copy_cpu(table.round(k, 0, reinterpret_cast<int64_t>(send[k % 2].data())), 2);
  }
  void unpack(int64_t k) {
    const Table table{unpacks.data(), unpack_tiles.data(), bounds.data(), kRounds, DType::kBFloat16, DType::kFloat32};
    copy_cpu(table.round(k, reinterpret_cast<int64_t>(receive[k % 2].data()), 0), 2, Stores::kPastCache);
  }
  void copy_local(int64_t k) {
    const Table table{locals.data(), local_tiles.data(), local_bounds.data(), kRounds, DType::kFloat32, DType::kFloat32};
    copy_cpu(table.round(k, 0, 0), 1, Stores::kPastCache);
  }
  void start_exchange(int64_t k) {
    nccl::exchange(communicator, nullptr, messages[k].data(), static_cast<int64_t>(messages[k].size()), send[k % 2].data(),
                   receive[k % 2].data());
  }
  void finish_exchange(int64_t) {}
};

void test_four_ranks() {
  nccl::UniqueId id{};
  nccl::check(nccl::library().GetUniqueId(&id), "ncclGetUniqueId");
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int rank = 0; rank < kRanks; ++rank)
    threads.emplace_back([&, rank] {
      Rank mine(rank, id);
      run_rounds(mine, kRounds);
      const int64_t matrix = kRounds * kRowsPerRound * kPitch;
      for (int64_t peer = 0; peer < kRanks; ++peer)
        for (int64_t i = 0; i < matrix; ++i) {
          const float sent = static_cast<float>((peer * 31 + rank * matrix + i) % 251);
          wrong += mine.destination[static_cast<size_t>(peer * matrix + i)] != (i % kPitch < kRow ? sent : -1.0f);
        }
    });
  for (auto& thread : threads) thread.join();
  CHECK(wrong == 0);
}

template <class F>
std::string error_of(F f) {
  try {
    f();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

void test_errors_name_the_call() {
  nccl::UniqueId id{};
  nccl::Communicator communicator = nullptr;
  nccl::check(nccl::library().CommInitRank(&communicator, 1, id, 0), "ncclCommInitRank");
  char buffer[8] = {};
  const Message to_itself[] = {{0, 1, 0, 8}, {0, 0, 0, 4}};
  const std::string text = error_of([&] { nccl::exchange(communicator, nullptr, to_itself, 2, buffer, buffer); });
  CHECK(text == "ncclGroupEnd: sizes differ");
  nccl::library().CommDestroy(communicator);
}

}  // namespace

int main() {
  CHECK(error_of([] { nccl::library("./no_such_libnccl.so.2"); }).find("NCCL cannot be loaded:\n  ./no_such_libnccl.so.2: ") == 0);
  nccl::library(FAKE_NCCL);
  test_order();
  test_four_ranks();
  test_errors_name_the_call();
  return 0;
}

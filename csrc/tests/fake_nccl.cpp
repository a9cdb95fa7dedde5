// A libnccl.so.2 whose ranks are threads of one process and whose pointers are host memory: it runs our sequence of calls.
//
// As in NCCL, sends and receives of a group are matched by pair and order when the group ends. Where NCCL would hang or write
// past the end, it returns an error: sizes that differ.
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <tuple>
#include <vector>

struct ncclUniqueId {
  char bytes[128];
};
struct ncclComm {
  std::string id;
  int rank;
};

namespace {

struct Call {
  bool is_send;
  char* data;
  size_t size;
  int peer;
  ncclComm* communicator;
};
struct Parcel {
  const char* data;
  size_t size;
  bool is_taken = false;
};

constexpr int kInvalidUsage = 5;
thread_local int depth = 0;
thread_local std::vector<Call> calls;
std::mutex mutex;
std::condition_variable changed;
std::map<std::tuple<std::string, int, int>, std::deque<Parcel*>> under_way;

int carry_out() {
  std::vector<Call> group;
  group.swap(calls);
  std::deque<Parcel> sent;
  int result = 0;
  std::unique_lock<std::mutex> lock(mutex);
  for (const Call& c : group)
    if (c.is_send) {
      sent.push_back(Parcel{c.data, c.size});
      under_way[{c.communicator->id, c.communicator->rank, c.peer}].push_back(&sent.back());
    }
  changed.notify_all();
  for (const Call& c : group)
    if (!c.is_send) {
      auto& queue = under_way[{c.communicator->id, c.peer, c.communicator->rank}];
      changed.wait(lock, [&] { return !queue.empty(); });
      Parcel* parcel = queue.front();
      queue.pop_front();
      if (parcel->size != c.size) result = kInvalidUsage;
      std::memcpy(c.data, parcel->data, std::min(parcel->size, c.size));
      parcel->is_taken = true;
      changed.notify_all();
    }
  changed.wait(lock, [&] {
    for (const Parcel& parcel : sent)
      if (!parcel.is_taken) return false;
    return true;
  });
  return result;
}

int add(Call call) {
  calls.push_back(call);
  return depth > 0 ? 0 : carry_out();
}

}  // namespace

extern "C" {
int ncclGetUniqueId(ncclUniqueId* id) {
  std::random_device random;
  for (char& byte : id->bytes) byte = static_cast<char>(random());
  return 0;
}
int ncclCommInitRank(ncclComm** communicator, int, ncclUniqueId id, int rank) {
  *communicator = new ncclComm{std::string(id.bytes, sizeof id.bytes), rank};
  return 0;
}
int ncclCommDestroy(ncclComm* communicator) {
  delete communicator;
  return 0;
}
const char* ncclGetErrorString(int result) { return result == kInvalidUsage ? "sizes differ" : "no error"; }
int ncclGroupStart() {
  ++depth;
  return 0;
}
int ncclGroupEnd() { return --depth > 0 ? 0 : carry_out(); }
int ncclSend(const void* data, size_t size, int, int peer, ncclComm* communicator, void*) {
  return add(Call{true, static_cast<char*>(const_cast<void*>(data)), size, peer, communicator});
}
int ncclRecv(void* data, size_t size, int, int peer, ncclComm* communicator, void*) {
  return add(Call{false, static_cast<char*>(data), size, peer, communicator});
}
}

#include "nccl_api.h"

#include <dlfcn.h>

#include <mutex>
#include <optional>
#include <stdexcept>

namespace rollpacker::nccl {
namespace {

void* open_library(const std::string& path) {
  std::string reasons;
  auto attempt = [&](const std::string& name, int flags) {
    void* handle = dlopen(name.c_str(), flags);
    if (handle == nullptr) {
      const char* reason = dlerror();
      reasons += "\n  " + name + ": " + (reason != nullptr ? reason : "not in this process yet");
    }
    return handle;
  };
  void* handle = nullptr;
  if (!path.empty()) {
    handle = attempt(path, RTLD_NOW);
  } else {
    handle = attempt("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
    if (handle == nullptr) handle = attempt("libnccl.so.2", RTLD_NOW);
  }
  if (handle == nullptr) throw std::runtime_error("NCCL cannot be loaded:" + reasons);
  return handle;
}

template <class Function>
void bind(void* handle, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(handle, name));
  if (function == nullptr) throw std::runtime_error(std::string("NCCL lacks the function ") + name);
}

Library load(const std::string& path) {
  void* handle = open_library(path);
  Library found{};
  bind(handle, "ncclGetUniqueId", found.GetUniqueId);
  bind(handle, "ncclCommInitRank", found.CommInitRank);
  bind(handle, "ncclCommDestroy", found.CommDestroy);
  bind(handle, "ncclGetErrorString", found.GetErrorString);
  bind(handle, "ncclGroupStart", found.GroupStart);
  bind(handle, "ncclGroupEnd", found.GroupEnd);
  bind(handle, "ncclSend", found.Send);
  bind(handle, "ncclRecv", found.Recv);
  return found;
}

}  // namespace

const Library& library(const std::string& path) {
  static std::mutex mutex;
  static std::optional<Library> loaded;
  std::lock_guard<std::mutex> lock(mutex);
  if (!loaded) loaded = load(path);
  return *loaded;
}

void check(Result result, const char* call) {
  if (result != kSuccess) throw std::runtime_error(std::string(call) + ": " + library().GetErrorString(result));
}

void exchange(Communicator communicator, Stream stream, const Message* messages, int64_t num_messages, char* send_buffer,
              char* receive_buffer) {
  const Library& api = library();
  check(api.GroupStart(), "ncclGroupStart");
  Result failed = kSuccess;
  for (int64_t i = 0; i < num_messages && failed == kSuccess; ++i) {
    const Message& m = messages[i];
    const size_t size = static_cast<size_t>(m.size);
    const int peer = static_cast<int>(m.peer);
    failed = m.is_send ? api.Send(send_buffer + m.offset, size, kBytes, peer, communicator, stream)
                       : api.Recv(receive_buffer + m.offset, size, kBytes, peer, communicator, stream);
  }
  const Result ended = api.GroupEnd();  // also after a failure, or this thread stays inside a group
  check(failed, "ncclSend or ncclRecv");
  check(ended, "ncclGroupEnd");
}

}  // namespace rollpacker::nccl

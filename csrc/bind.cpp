// The Python module rollpacker.weights._reshard. Tables are int64 arrays; tensors come as addresses that
// rollpacker/weights/reshard.py has checked (dtype, layout, length), because only it knows whose they are.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "copy_cpu.h"
#include "nccl_api.h"
#include "rounds.h"
#ifdef ROLLPACKER_WITH_CUDA
#include "refit_cuda.h"
#endif

namespace nb = nanobind;
using namespace rollpacker;

namespace {

// noconvert() where these are arguments: nanobind would else accept any array and hand over a temporary copy.
using Rows = nb::ndarray<const int64_t, nb::shape<-1, kSegmentFields>, nb::c_contig, nb::device::cpu>;
using Numbers = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Messages = nb::ndarray<const int64_t, nb::shape<-1, kMessageFields>, nb::c_contig, nb::device::cpu>;

struct BoundTable {
  Rows segments;
  Numbers bounds;
  std::vector<int64_t> tile_begin;
  DType from, to;

  BoundTable(Rows rows, Numbers round_bounds, int from_dtype, int to_dtype)
      : segments(rows), bounds(round_bounds), from(static_cast<DType>(from_dtype)), to(static_cast<DType>(to_dtype)) {
    with_types(from, to, [](auto, auto) {});  // throws where a code is unknown
    const int64_t size = static_cast<int64_t>(rows.shape(0));
    const int64_t* b = bounds.data();
    if (bounds.shape(0) < 2 || b[0] != 0 || b[bounds.shape(0) - 1] != size)
      throw std::invalid_argument("bounds must run from 0 to the number of segments");
    for (size_t k = 1; k < bounds.shape(0); ++k)
      if (b[k] < b[k - 1]) throw std::invalid_argument("bounds must not fall");
    tile_begin.push_back(0);
    for (int64_t k = 0; k < size; ++k) {
      const Segment& s = table().segments[k];
      if (s.row_elements <= 0 || s.begin < 0 || s.end < s.begin)
        throw std::invalid_argument("segment " + std::to_string(k) + " has no elements or a negative range");
      tile_begin.push_back(tile_begin.back() + num_tiles(s));
    }
  }

  int64_t num_rounds() const { return static_cast<int64_t>(bounds.shape(0)) - 1; }
  Table table() const {
    return Table{reinterpret_cast<const Segment*>(segments.data()), tile_begin.data(), bounds.data(), num_rounds(), from, to};
  }
};

// Device of run_rounds(): threads copy, and two Python functions move a round's buffers through MPI.
struct Host {
  Table pack_table, local_table, unpack_table;
  std::vector<int64_t> send_buffers, receive_buffers;
  int threads;
  nb::callable start, finish;

  void copy(const Batch& batch, Stores stores) {
    nb::gil_scoped_release release;
    copy_cpu(batch, threads, stores);
  }
  // A buffer is read at once; the engine's weights only when all of them are there.
  void pack(int64_t k) { copy(pack_table.round(k, 0, send_buffers[k % 2]), Stores::kCached); }
  void copy_local(int64_t k) { copy(local_table.round(k, 0, 0), Stores::kPastCache); }
  void unpack(int64_t k) { copy(unpack_table.round(k, receive_buffers[k % 2], 0), Stores::kPastCache); }
  void start_exchange(int64_t k) { start(k); }
  void finish_exchange(int64_t k) { finish(k); }
};

int64_t common_rounds(const BoundTable& pack, const BoundTable& local, const BoundTable& unpack) {
  if (pack.num_rounds() != local.num_rounds() || pack.num_rounds() != unpack.num_rounds())
    throw std::invalid_argument("the tables differ in their number of rounds");
  return pack.num_rounds();
}

void require_two(const std::vector<int64_t>& buffers) {
  if (buffers.size() != 2) throw std::invalid_argument("a refit needs two buffers for each direction");
}

void run_on_host(const BoundTable& pack, const BoundTable& local, const BoundTable& unpack, std::vector<int64_t> send_buffers,
                 std::vector<int64_t> receive_buffers, int threads, nb::callable start, nb::callable finish) {
  require_two(send_buffers);
  require_two(receive_buffers);
  Host host{pack.table(), local.table(), unpack.table(), send_buffers, receive_buffers, threads, start, finish};
  run_rounds(host, common_rounds(pack, local, unpack));
}

// All rounds of a table at once; lanes > 0 runs the CUDA kernel's body on the CPU.
void copy_all(const BoundTable& table, int64_t source_base, int64_t destination_base, int threads, int lanes,
              bool past_cache) {
  nb::gil_scoped_release release;
  for (int64_t k = 0; k < table.num_rounds(); ++k) {
    const Batch batch = table.table().round(k, source_base, destination_base);
    if (lanes > 0) {
      copy_emulated(batch, lanes);
    } else {
      copy_cpu(batch, threads, past_cache ? Stores::kPastCache : Stores::kCached);
    }
  }
}

}  // namespace

NB_MODULE(_reshard, m) {
  m.attr("FLOAT32") = static_cast<int>(DType::kFloat32);
  m.attr("BFLOAT16") = static_cast<int>(DType::kBFloat16);
  m.attr("FLOAT16") = static_cast<int>(DType::kFloat16);
  nb::class_<BoundTable>(m, "Table")
      .def(nb::init<Rows, Numbers, int, int>(), nb::arg("segments").noconvert(), nb::arg("bounds").noconvert(),
           nb::arg("source_dtype"), nb::arg("destination_dtype"));
  m.def("copy", &copy_all, nb::arg("table"), nb::arg("source_base") = 0, nb::arg("destination_base") = 0,
        nb::arg("threads") = 1, nb::arg("lanes") = 0, nb::arg("past_cache") = false);
  m.def("run_on_host", &run_on_host, nb::arg("pack"), nb::arg("local"), nb::arg("unpack"), nb::arg("send_buffers"),
        nb::arg("receive_buffers"), nb::arg("threads"), nb::arg("start"), nb::arg("finish"));
#ifdef ROLLPACKER_WITH_CUDA
  m.attr("WITH_CUDA") = true;
  m.def("nccl_unique_id", [] {
    nccl::UniqueId id{};
    nccl::check(nccl::library().GetUniqueId(&id), "ncclGetUniqueId");
    return nb::bytes(id.bytes, sizeof id.bytes);
  });
  m.def(
      "nccl_communicator",
      [](const nb::bytes& id, int size, int rank) {
        nccl::UniqueId unique{};
        if (id.size() != sizeof unique.bytes) throw std::invalid_argument("a unique id of NCCL has 128 bytes");
        std::memcpy(unique.bytes, id.c_str(), sizeof unique.bytes);
        const nccl::Library& api = nccl::library();
        nccl::Communicator communicator = nullptr;
        nccl::Result result;
        {
          nb::gil_scoped_release release;  // it waits for the other ranks
          result = api.CommInitRank(&communicator, size, unique, rank);
        }
        nccl::check(result, "ncclCommInitRank");
        return reinterpret_cast<int64_t>(communicator);
      },
      nb::arg("id"), nb::arg("size"), nb::arg("rank"));
  nb::class_<CudaRefit>(m, "CudaRefit")
      .def("__init__",
           [](CudaRefit* self, const BoundTable& pack, const BoundTable& local, const BoundTable& unpack, Messages messages,
              Numbers bounds, int64_t communicator) {
             const int64_t num_rounds = common_rounds(pack, local, unpack);
             const int64_t size = static_cast<int64_t>(messages.shape(0));
             if (static_cast<int64_t>(bounds.shape(0)) != num_rounds + 1 || bounds.data()[num_rounds] != size)
               throw std::invalid_argument("message bounds must run to the number of messages, an entry a round and one more");
             const auto* first = reinterpret_cast<const Message*>(messages.data());
             new (self) CudaRefit(pack.table(), local.table(), unpack.table(), {first, first + size},
                                  {bounds.data(), bounds.data() + num_rounds + 1},
                                  reinterpret_cast<nccl::Communicator>(communicator));
           },
           nb::arg("pack"), nb::arg("local"), nb::arg("unpack"), nb::arg("messages").noconvert(),
           nb::arg("message_bounds").noconvert(), nb::arg("communicator"))
      .def(
          "run",
          [](CudaRefit& self, std::vector<int64_t> send_buffers, std::vector<int64_t> receive_buffers, int64_t stream) {
            require_two(send_buffers);
            require_two(receive_buffers);
            const int64_t send[2] = {send_buffers[0], send_buffers[1]}, receive[2] = {receive_buffers[0], receive_buffers[1]};
            self.run(send, receive, reinterpret_cast<void*>(stream));
          },
          nb::arg("send_buffers"), nb::arg("receive_buffers"), nb::arg("stream"),
          nb::call_guard<nb::gil_scoped_release>());
#else
  m.attr("WITH_CUDA") = false;
#endif
}

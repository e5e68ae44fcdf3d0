// Collectives: gloo over the same bytes, with NCCL's order of streams. And what Python sees. The one file that is compiled.
#include "fallback.h"

#include <pybind11/chrono.h>
#include <pybind11/functional.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <thread>

namespace simulated {

using Tensors = std::vector<Tensor>;
using WorkPointer = c10::intrusive_ptr<c10d::Work>;
using Milliseconds = std::chrono::milliseconds;

// ---------------------------------------------------------------- the same collectives on all ranks
// Ranks that call different collectives of a group hang on a device, or get garbage. Here each rank writes what it calls into
// memory that all ranks of the group share, before it hands anything to gloo, and reads what the others wrote for the same
// number. So whoever comes last knows before any byte is sent. Whoever came first finds out when it waits.
//
// A row of the memory belongs to one writer: a rank's collectives, what it sends to one peer, or what it receives from one. A
// row holds the last kEntries calls; one that was overwritten is not compared.
class Ledger {
 public:
  struct Entry {
    std::atomic<uint64_t> number;  // of the call in its row, from 1; 0: being written
    char call[160], place[200];
    double time;  // on the timeline: when the rank is ready for it
  };
  static constexpr int kEntries = 64;
  struct Row {
    std::atomic<uint64_t> calls;
    Entry entries[kEntries];
  };

  Ledger(const std::string& file, int rank, int size) : rank_(rank), size_(size) {
    const int handle = open(file.c_str(), O_RDWR);
    TORCH_CHECK(handle >= 0, file, ": ", std::strerror(errno));
    auto mapped = mmap(nullptr, bytes(size), PROT_READ | PROT_WRITE, MAP_SHARED, handle, 0);
    close(handle);
    TORCH_CHECK(mapped != MAP_FAILED, file, ": ", std::strerror(errno));
    rows_ = static_cast<Row*>(mapped);
  }
  ~Ledger() { munmap(rows_, bytes(size_)); }

  static size_t bytes(int size) { return sizeof(Row) * (size + 2 * size * size); }
  int collectives(int rank) const { return rank; }
  int sends(int from, int to) const { return size_ + from * size_ + to; }
  int receives(int from, int to) const { return size_ + size_ * size_ + from * size_ + to; }

  uint64_t write(int row, const std::string& call, const std::string& place, double time) {
    const auto number = rows_[row].calls + 1;
    auto& entry = at(row, number);
    entry.number = 0;
    snprintf(entry.call, sizeof entry.call, "%s", call.c_str());
    snprintf(entry.place, sizeof entry.place, "%s", place.c_str());
    entry.time = time;
    entry.number = number;
    rows_[row].calls = number;
    return number;
  }
  bool has(int row, uint64_t number) const { return rows_[row].calls >= number; }

  // On the timeline: when all ranks are ready for a call that all have made.
  double time(const std::map<int, int>& rows_of_ranks, uint64_t number) const {
    double last = 0;
    for (auto [rank, row] : rows_of_ranks)
      if (const auto& entry = at(row, number); entry.number == number) last = std::max(last, entry.time);
    return last;
  }

  // What differs between a call of this rank and those of others that have the same number; empty: nothing so far.
  std::string difference(int own_row, const std::map<int, int>& rows_of_ranks, uint64_t number) const {
    const auto& own = at(own_row, number);
    for (auto [rank, row] : rows_of_ranks) {
      const auto& other = at(row, number);
      if (rank == rank_ || other.number != number) continue;
      const std::string call = other.call, place = other.place;
      if (other.number == number && call != own.call)
        return c10::str(number, ": rank ", rank_, " calls ", own.call, " [", own.place, "], rank ", rank, " calls ", call, " [",
                        place, "]");
    }
    return "";
  }

 private:
  Entry& at(int row, uint64_t number) const { return rows_[row].entries[number % kEntries]; }
  int rank_, size_;
  Row* rows_;
};

inline std::string text_of(const Tensors& tensors) {
  std::string text;
  for (auto& tensor : tensors)
    text += c10::str(text.empty() ? "" : ", ", tensor.scalar_type(), " x ", tensor.numel());
  return text;
}

// ---------------------------------------------------------------- works
// What gloo does, and the tensors that it does it with. It is shared by the work that Python has and by what is pending for the
// host, and lets go of the tensors when the first of them has waited: otherwise no memory of a collective would ever be freed
// and used again, and no bug of that kind seen.
struct Transfer {
  std::recursive_mutex mutex;
  Milliseconds patience{0};
  std::vector<WorkPointer> works;
  Tensors tensors;
  std::vector<std::function<void()>> afters;
  std::vector<std::function<void()>> settlements;  // set the end on the timeline, when all ranks have called the same
  std::vector<std::function<bool()>> checks;  // whether all ranks have called the same; raise if they call something else

  bool completed() {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    return std::all_of(works.begin(), works.end(), [](auto& work) { return work->isCompleted(); });
  }
  void finish(Milliseconds timeout) {
    Tensors let_go;  // after the lock
    std::lock_guard<std::recursive_mutex> lock(mutex);
    // gloo could not be stopped once it waits: where its time is up, it takes the whole group to have failed.
    const auto began = std::chrono::steady_clock::now();
    for (auto& check : checks)
      while (!check() && !completed() && std::chrono::steady_clock::now() - began < patience)
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    for (auto& work : works) work->wait(timeout);
    for (auto& settle : settlements) settle();
    for (auto& after : afters) after();
    works.clear();
    std::swap(let_go, tensors);
    afters.clear();
    checks.clear();
    settlements.clear();
  }
};

struct Work final : c10d::Work {
  std::shared_ptr<Transfer> transfer = std::make_shared<Transfer>();
  int slot = 0, device = 0;
  std::vector<uint64_t> pending;
  // On the timeline: when all before a batch has ended; its transfers, both ways, run together from then on. -1: not known yet.
  std::shared_ptr<double> batch_begin = std::make_shared<double>(-1);
  Clock end;
  std::shared_ptr<double> ended = std::make_shared<double>(0);  // on the timeline
  Tensors tensors;  // kept until the first wait, as NCCL does
  bool waited = false;

  ~Work() override {
    Lock lock(world.mutex);
    if (waited) return;
    for (auto& tensor : tensors)  // whoever never waits has NCCL tell the allocator
      if (auto memory = allocation_of(tensor.storage().data_ptr())) memory->recorded.insert(slot);
  }
  bool isCompleted() override { return transfer->completed(); }
  bool isSuccess() const override { return true; }  // what fails raises where it is waited for
  void synchronize() override { wait(kNoTimeout); }
  Tensors result() override { return tensors; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return transfer->works.at(0)->getFuture(); }
  bool wait(Milliseconds timeout) override {
    transfer->finish(timeout);
    const bool ignored = order_is_ignored("work.wait");
    Tensors let_go;  // after the lock
    std::vector<std::function<void()>> done;
    Lock lock(world.mutex);
    for (auto number : pending)
      if (auto item = world.pending.find(number); item != world.pending.end()) {
        done.push_back(std::move(item->second.finish));
        world.pending.erase(item);
      }
    end.time = std::max(end.time, *ended);
    if (!ignored) world.streams[current_slot(device)].join(end);
    waited = true;
    std::swap(let_go, tensors);
    return true;
  }
};

// ---------------------------------------------------------------- reductions that gloo lacks
inline std::string name_of(const c10d::ReduceOp& op) {
  static const char* const names[] = {"sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum"};
  return names[static_cast<int>(op.op_)];
}

// As NCCL: an average of floating-point numbers is a sum of what each rank has divided; one of integers divides the sum, for
// which see divides_after. Makes `op` a sum, and returns the factor by which each rank multiplies first, in the tensors' dtype.
inline std::optional<Tensor> factor_before(c10d::ReduceOp& op, const Tensor& like, int size) {
  Tensor factor;
  if (op.op_ == c10d::ReduceOp::AVG) {
    factor = at::scalar_tensor(1.0 / size, at::kDouble);
  } else if (op.op_ == c10d::ReduceOp::PREMUL_SUM) {
    auto given = c10::static_intrusive_pointer_cast<c10d::NCCLPreMulSumSupplement>(op.supplement_);
    factor = given->tensor_factor;
    if (!factor.defined()) factor = at::scalar_tensor(given->double_factor, at::kDouble);
    if (factor.device().type() == kDevice) factor = cpu_alias(factor);
  } else {
    return std::nullopt;
  }
  op = c10d::ReduceOp::SUM;
  return factor.reshape({}).to(like.scalar_type());
}

class Backend final : public c10d::Backend {
 public:
  Backend(c10::intrusive_ptr<c10d::Backend> gloo, std::string name, std::shared_ptr<Ledger> ledger, Milliseconds timeout)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), name_(std::move(name)), slot_(new_slot()),
        ledger_(std::move(ledger)), timeout_(timeout) {}
  const std::string getBackendName() const override { return name_; }
  void setTimeout(Milliseconds timeout) override {
    timeout_ = timeout;
    gloo_->setTimeout(timeout);
  }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }

  // As NCCL's: what is called between the two runs on the group's stream, and is one work.
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { batch_ = c10::make_intrusive<Work>(); }
  WorkPointer endCoalescing() override { return std::exchange(batch_, {}); }

  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const auto call = c10::str("broadcast from ", options.rootRank, " of ", text_of(tensors));
    return run("broadcast", call, tensors, tensors, options.asyncOp,
        [&, bytes = borrow(tensors)]() mutable { return gloo_->broadcast(bytes, options); });
  }
  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return reduced_in_place(
        "allreduce", "", tensors, options, [&](Tensors& bytes, auto& o) { return gloo_->allreduce(bytes, o); });
  }
  WorkPointer allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return reduced_in_place(
        "allreduce", "", tensors, options, [&](Tensors& bytes, auto& o) { return gloo_->allreduce_coalesced(bytes, o); });
  }
  WorkPointer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return reduced_in_place("reduce", c10::str(" to ", options.rootRank), tensors, options,
        [&](Tensors& bytes, auto& o) { return gloo_->reduce(bytes, o); });
  }
  WorkPointer allgather(std::vector<Tensors>& outs, Tensors& ins, const c10d::AllgatherOptions& options) override {
    return run("allgather", "allgather of " + text_of(flat(outs)), ins, flat(outs), options.asyncOp,
        [&, to = borrow(outs), from = borrow(ins)]() mutable { return gloo_->allgather(to, from, options); });
  }
  WorkPointer _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& options) override {
    return run("allgather", "allgather of " + text_of({in}) + " each", {in}, {out}, options.asyncOp,
        [&, to = borrow(out), from = borrow(in)]() mutable { return gloo_->_allgather_base(to, from, options); });
  }
  WorkPointer allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::AllgatherOptions& options) override {
    return run("allgather", "allgather of " + text_of(ins) + " each", ins, outs, options.asyncOp,
        [&, to = borrow(outs), from = borrow(ins)]() mutable {
          return gloo_->allgather_into_tensor_coalesced(to, from, options);
        });
  }
  WorkPointer gather(std::vector<Tensors>& outs, Tensors& ins, const c10d::GatherOptions& options) override {
    const auto call = c10::str("gather to ", options.rootRank, " of ", text_of(ins), " each");
    return run("gather", call, ins, flat(outs), options.asyncOp,
        [&, to = borrow(outs), from = borrow(ins)]() mutable { return gloo_->gather(to, from, options); });
  }
  WorkPointer scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ScatterOptions& options) override {
    const auto call = c10::str("scatter from ", options.rootRank, " of ", text_of(outs), " each");
    return run("scatter", call, flat(ins), outs, options.asyncOp,
        [&, to = borrow(outs), from = borrow(ins)]() mutable { return gloo_->scatter(to, from, options); });
  }
  WorkPointer reduce_scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ReduceScatterOptions& options) override {
    return reduce_scattered(flat(ins), outs, text_of(flat(ins)), options, [&](const Tensors& from, Tensors& to, auto& o) {
      std::vector<Tensors> lists = {from};
      return gloo_->reduce_scatter(to, lists, o);
    });
  }
  WorkPointer _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& options) override {
    return reduce_scattered({in}, {out}, text_of({out}) + " each", options, [&](Tensors& from, Tensors& to, auto& o) {
      return gloo_->_reduce_scatter_base(to[0], from[0], o);
    });
  }
  WorkPointer reduce_scatter_tensor_coalesced(
      Tensors& outs, Tensors& ins, const c10d::ReduceScatterOptions& options) override {
    return reduce_scattered(ins, outs, text_of(outs) + " each", options, [&](Tensors& from, Tensors& to, auto& o) {
      return gloo_->reduce_scatter_tensor_coalesced(to, from, o);
    });
  }
  WorkPointer alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& out_rows, std::vector<int64_t>& in_rows,
                            const c10d::AllToAllOptions& options) override {
    // Ranks may exchange different numbers of elements.
    return run("alltoall", c10::str("alltoall of ", in.scalar_type()), {in}, {out}, options.asyncOp,
        [&, to = borrow(out), from = borrow(in)]() mutable {
          return gloo_->alltoall_base(to, from, out_rows, in_rows, options);
        });
  }
  WorkPointer send(Tensors& tensors, int to, int tag) override {
    return between("send", tensors, {}, getRank(), to, tag,
        [&, bytes = borrow(tensors)]() mutable { return gloo_->send(bytes, to, tag); });
  }
  WorkPointer recv(Tensors& tensors, int from, int tag) override {
    return between("recv", {}, tensors, from, getRank(), tag,
        [&, bytes = borrow(tensors)]() mutable { return gloo_->recv(bytes, from, tag); });
  }
  WorkPointer barrier(const c10d::BarrierOptions& options) override {
    host_waits("barrier", current_slot(current_device));
    announce("barrier", place_here(), every_row(), 0).check();
    return gloo_->barrier(options);
  }

 private:
  struct Announced {
    uint64_t number;
    std::function<bool()> check;
  };
  struct Rows {  // of the ledger: where this rank writes, and where the ranks that take part do
    int own = 0;
    std::map<int, int> all;
  };

  // async: on the group's stream, after the caller's; otherwise on the caller's. `start` hands the bytes to gloo.
  template <class Start>
  WorkPointer run(const char* name, const std::string& call, const Tensors& ins, const Tensors& outs, bool async, Start start) {
    const int caller = current_slot((ins.empty() ? outs : ins).at(0).device().index());
    return run_on(async ? slot_ : caller, slot_, name, call, ins, outs, every_row(), start);
  }

  // Pairs of ranks have a stream each, but for what is called in one batch.
  template <class Start>
  WorkPointer between(const char* name, const Tensors& ins, const Tensors& outs, int from, int to, int tag, Start start) {
    const int peer = from == getRank() ? to : from;
    auto slot = pair_slots_.find(peer);
    if (slot == pair_slots_.end()) slot = pair_slots_.emplace(peer, new_slot()).first;
    const auto call = c10::str("transfer from ", from, " to ", to, ", tag ", tag, ", of ", text_of(ins.empty() ? outs : ins));
    const int sends = ledger_->sends(from, to), receives = ledger_->receives(from, to);
    const Rows rows = {from == getRank() ? sends : receives, {{from, sends}, {to, receives}}};
    const int used = batch_ ? slot_ : slot->second;
    return run_on(used, used, name, call, ins, outs, rows, start);
  }

  template <class Start>
  WorkPointer run_on(int slot, int communicator, const char* name, const std::string& call, const Tensors& ins,
                     const Tensors& outs, Rows rows, Start& start) {
    const auto device = (ins.empty() ? outs : ins).at(0).device();
    for (auto all : {&ins, &outs})
      for (auto& tensor : *all)
        TORCH_CHECK(tensor.device().type() == kDevice && tensor.device() == device && tensor.is_contiguous(), name_, ": ", name,
                    " takes contiguous tensors of one device, not one on ", tensor.device());
    const int caller = current_slot(device.index());
    const auto place = place_here();
    double ready;
    {
      Lock lock(world.mutex);
      ready = std::max({world.host.time, world.streams[caller].time, world.streams[slot].time});
    }
    const auto announced = announce(call, place, rows, ready);
    announced.check();
    auto work = batch_ ? batch_ : c10::make_intrusive<Work>();
    {
      Findings findings;
      Lock lock(world.mutex);
      world.counts["collectives"]++;
      world.counts[std::string("collective ") + name]++;
      launch(caller);
      world.streams[slot].join(world.streams[caller]);
      const auto epoch = launch(slot);
      for (auto& tensor : ins) note(tensor, false, slot, epoch, name, place, findings);
      for (auto& tensor : outs) note(tensor, true, slot, epoch, name, place, findings);
      work->end = world.streams[slot];
      if (world.timeline) world.host.time += world.timeline->launch;
    }
    work->slot = slot;
    work->device = device.index();
    for (auto all : {&ins, &outs})
      for (auto kept : {&work->tensors, &work->transfer->tensors}) kept->insert(kept->end(), all->begin(), all->end());
    work->transfer->patience = timeout_;
    work->transfer->works.push_back(start());
    work->transfer->checks.push_back(announced.check);
    if (auto timeline = timeline_now()) {
      double bytes[2] = {0, 0};
      for (auto& tensor : ins) bytes[0] += double(tensor.nbytes());
      for (auto& tensor : outs) bytes[1] += double(tensor.nbytes());
      const auto [seconds, axis] = timeline->collectives(name, getSize(), std::max(bytes[0], bytes[1]));
      const auto batch = batch_ ? batch_->batch_begin : std::make_shared<double>(-1);
      Lock lock(world.mutex);
      const auto turn = ++timeline->last;
      timeline->unsettled[communicator][turn] = [=, seconds = seconds, axis = axis, ended = work->ended, ledger = ledger_,
                                                 number = announced.number](Timeline& on) {
        if (*batch < 0) *batch = std::max(on.free[slot], on.free[communicator]);
        const auto begin = std::max(ledger->time(rows.all, number), *batch);
        const auto end = begin + seconds;
        for (auto time : {ended.get(), &on.free[slot], &on.free[communicator], &world.streams[slot].time})
          *time = std::max(*time, end);
        on.spans.push_back({slot, name, begin, end, true, axis});
      };
      work->transfer->settlements.push_back([timeline, communicator, turn] {
        Lock lock(world.mutex);
        timeline->settle(communicator, turn);
      });
    }
    // Nobody else makes the bytes arrive where the host waits for the stream, and not for the work.
    work->pending.push_back(
        when_the_host_learns(slot, work->end.of(slot), [transfer = work->transfer] { transfer->finish(kNoTimeout); }));
    return work;
  }

  template <class Options, class Start>
  WorkPointer reduced_in_place(const char* name, const std::string& detail, Tensors& tensors, Options options, Start start) {
    const auto call = name + detail + " by " + name_of(options.reduceOp) + ", " + text_of(tensors);
    auto bytes = borrow(tensors);
    const bool divides = divides_after(options.reduceOp, bytes);
    const auto factor = factor_before(options.reduceOp, bytes[0], getSize());
    auto work = run(name, call, tensors, tensors, options.asyncOp, [&] {
      if (factor)
        for (auto& tensor : bytes) tensor.mul_(*factor);
      return start(bytes, options);
    });
    if (divides) divide_after(work, bytes);
    return work;
  }

  template <class Start>
  WorkPointer reduce_scattered(
      const Tensors& ins, const Tensors& outs, const std::string& sizes, c10d::ReduceScatterOptions options, Start start) {
    const auto call = "reduce_scatter by " + name_of(options.reduceOp) + " of " + sizes;
    auto from = borrow(ins), to = borrow(outs);
    const bool divides = divides_after(options.reduceOp, to);
    const auto factor = factor_before(options.reduceOp, to[0], getSize());
    auto work = run("reduce_scatter", call, ins, outs, options.asyncOp, [&] {
      if (factor)
        for (auto& tensor : from) tensor = tensor.mul(*factor);
      return start(from, to, options);
    });
    if (divides) divide_after(work, to);
    return work;
  }

  static bool divides_after(c10d::ReduceOp& op, const Tensors& bytes) {
    if (op.op_ != c10d::ReduceOp::AVG || bytes[0].is_floating_point()) return false;
    op = c10d::ReduceOp::SUM;
    return true;
  }
  void divide_after(const WorkPointer& work, const Tensors& bytes) {
    static_cast<Work*>(work.get())->transfer->afters.push_back([bytes, size = getSize()] {
      for (auto tensor : bytes) tensor.div_(size, "trunc");
    });
  }

  Rows every_row() const {
    Rows rows;
    rows.own = ledger_->collectives(getRank());
    for (int rank = 0; rank < getSize(); rank++) rows.all[rank] = ledger_->collectives(rank);
    return rows;
  }

  // Writes the call into the ledger, and returns what compares it with the others'.
  Announced announce(const std::string& call, Place place, const Rows& rows, double ready) {
    const auto number = ledger_->write(rows.own, call, *place, ready);
    auto check = [ledger = ledger_, rows, number, group = getGroupUid()] {
      const auto difference = ledger->difference(rows.own, rows.all, number);
      const auto text = "ranks of the group '" + group + "' differ in call " + difference;
      if (!difference.empty()) report("order", text);
      TORCH_CHECK(difference.empty(), text);
      return std::all_of(
          rows.all.begin(), rows.all.end(), [&](const auto& item) { return ledger->has(item.second, number); });
    };
    return {number, check};
  }

  // The same bytes for gloo, whose threads let go of their tensors some time after the work has ended. These keep nothing: the
  // transfer does, so that it is known when memory is freed.
  static Tensor borrow(const Tensor& tensor) {
    const auto& storage = tensor.storage();
    auto impl = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), storage.nbytes(),
        c10::DataPtr(const_cast<void*>(storage.data()), c10::Device(c10::kCPU)), nullptr, /*resizable=*/false);
    return tensor_over(c10::Storage(std::move(impl)), tensor, c10::DispatchKey::CPU);
  }
  static Tensors borrow(const Tensors& tensors) {
    Tensors all;
    for (auto& tensor : tensors) all.push_back(borrow(tensor));
    return all;
  }
  static std::vector<Tensors> borrow(const std::vector<Tensors>& lists) {
    std::vector<Tensors> all;
    for (auto& list : lists) all.push_back(borrow(list));
    return all;
  }
  static Tensors flat(const std::vector<Tensors>& lists) {
    Tensors all;
    for (auto& list : lists) all.insert(all.end(), list.begin(), list.end());
    return all;
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  std::string name_;
  int slot_;
  std::map<int, int> pair_slots_;  // by peer
  c10::intrusive_ptr<Work> batch_;
  std::shared_ptr<Ledger> ledger_;
  Milliseconds timeout_;
};

}  // namespace simulated

PYBIND11_MODULE(_native, module) {
  using namespace simulated;
  module.def("start", [](int devices, bool mixing_raises, std::string own_file, std::vector<std::string> foreign_files,
                         py::object on_report) {
    world.own_file = std::move(own_file);
    world.devices = std::min(devices, kMostDevices);
    world.mixing_raises = mixing_raises;
    world.foreign_files = std::move(foreign_files);
    world.on_report = new py::object(std::move(on_report));
    c10::SetAllocator(kDevice, &allocator, 1);
    at::setHostAllocator(kDevice, &pinned_allocator, 1);
    c10::impl::registerDeviceGuard(kDevice, &guard);
    at::RegisterPrivateUse1HooksInterface(new Hooks);
  });
  module.attr("total_bytes") = kTotalBytes;
  module.def("stop_reports", [] { world.on_report = nullptr; });
  module.def("counts", [] {
    Lock lock(world.mutex);
    return world.counts;
  });
  module.def("orders", [] {
    Lock lock(world.mutex);
    return world.orders;
  });
  module.def("reset_counts", [] {
    Lock lock(world.mutex);
    world.counts.clear();
    world.orders.clear();
  });
  module.def("ignore_orders", [](std::vector<std::string> parts) {
    Lock lock(world.mutex);
    world.ignored_orders = std::move(parts);
  });
  module.def("start_timeline", [](decltype(Timeline::operators) operators, decltype(Timeline::collectives) collectives,
                                  double launch) {
    Lock lock(world.mutex);
    world.stop_time();
    world.timeline = std::make_shared<Timeline>(Timeline{std::move(operators), std::move(collectives), launch, {}, {}, {}});
  });
  module.def("stop_timeline", [] {
    std::shared_ptr<Timeline> ended;
    {
      Lock lock(world.mutex);
      ended = std::exchange(world.timeline, nullptr);
      world.stop_time();  // now, because events that are recorded before the next timeline copy it
    }
    std::vector<std::tuple<int, std::string, double, double, bool, std::string>> spans;
    for (auto& span : ended->spans)
      spans.emplace_back(span.slot, span.name, span.begin, span.end, span.collective, span.axis);
    return spans;
  });
  module.def("place", [] { return *place_here(); });
  module.def("memory", [](int device) { return std::make_pair(bytes_of[device].now, bytes_of[device].peak); });
  module.def("reset_peak", [](int device) { bytes_of[device].peak = bytes_of[device].now; });
  module.def("watch_peak", [](int device, bool watched) {
    Lock lock(world.mutex);
    bytes_of[device].watched = watched;
    bytes_of[device].at_peak.clear();
  });
  module.def("at_peak", [](int device) {  // bytes, and the operator and lines that allocated them
    std::vector<std::pair<int64_t, std::string>> found;
    Lock lock(world.mutex);
    for (auto& [bytes, place] : bytes_of[device].at_peak) found.emplace_back(bytes, place ? *place : "");
    return found;
  });
  module.def("generator", [](int device) { return default_generator(device); });
  py::class_<Ledger, std::shared_ptr<Ledger>>(module, "Ledger")
      .def(py::init<std::string, int, int>())
      .def_static("bytes", &Ledger::bytes);
  module.def("backend", [](c10::intrusive_ptr<c10d::Backend> gloo, std::string name, std::shared_ptr<Ledger> ledger,
                            Milliseconds timeout)
      -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Backend>(std::move(gloo), std::move(name), std::move(ledger), timeout);
  });
}

// Collectives: gloo over the same bytes, with NCCL's order of streams. And what Python sees. The one file that is compiled.
#include "fallback.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace simulated {

using Tensors = std::vector<Tensor>;
using WorkPointer = c10::intrusive_ptr<c10d::Work>;

struct Work final : c10d::Work {
  // gloo's work keeps its tensors until it dies. It is shared with what is pending for the host, and let go by the first wait:
  // otherwise no memory of a collective would ever be freed and used again, and no such bug seen.
  std::shared_ptr<WorkPointer> inner = std::make_shared<WorkPointer>();
  int slot = 0, device = 0;
  uint64_t pending = 0;
  Clock end;
  Tensors tensors;  // kept until the first wait, as NCCL does
  bool waited = false;

  ~Work() override {
    Lock lock(world.mutex);
    if (waited) return;
    for (auto& tensor : tensors)  // whoever never waits has NCCL tell the allocator
      if (auto memory = allocation_of(tensor.storage().data_ptr())) memory->recorded.insert(slot);
  }
  bool isCompleted() override { return !*inner || (*inner)->isCompleted(); }
  bool isSuccess() const override { return !*inner || (*inner)->isSuccess(); }
  void synchronize() override { wait(kNoTimeout); }
  Tensors result() override { return tensors; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return (*inner)->getFuture(); }
  bool wait(std::chrono::milliseconds timeout) override {
    if (auto work = *inner) work->wait(timeout);
    inner->reset();
    const bool ignored = order_is_ignored("work.wait");
    Tensors let_go;  // after the lock
    Lock lock(world.mutex);
    world.pending.erase(pending);
    if (!ignored) world.streams[current_slot(device)].join(end);
    waited = true;
    std::swap(let_go, tensors);
    return true;
  }
};

class Backend final : public c10d::Backend {
 public:
  Backend(c10::intrusive_ptr<c10d::Backend> gloo, std::string name)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), name_(std::move(name)), slot_(new_slot()) {}
  const std::string getBackendName() const override { return name_; }
  void setTimeout(std::chrono::milliseconds timeout) override { gloo_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }

  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto bytes = cpu(tensors);
    return run("broadcast", tensors, tensors, options.asyncOp, [&] { return gloo_->broadcast(bytes, options); });
  }
  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto bytes = cpu(tensors);
    return run("allreduce", tensors, tensors, options.asyncOp, [&] { return gloo_->allreduce(bytes, options); });
  }
  WorkPointer allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    auto bytes = cpu(tensors);
    return run("allreduce", tensors, tensors, options.asyncOp, [&] { return gloo_->allreduce_coalesced(bytes, options); });
  }
  WorkPointer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto bytes = cpu(tensors);
    return run("reduce", tensors, tensors, options.asyncOp, [&] { return gloo_->reduce(bytes, options); });
  }
  WorkPointer allgather(std::vector<Tensors>& outs, Tensors& ins, const c10d::AllgatherOptions& options) override {
    auto to = cpu(outs);
    auto from = cpu(ins);
    return run("allgather", ins, flat(outs), options.asyncOp, [&] { return gloo_->allgather(to, from, options); });
  }
  WorkPointer _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& options) override {
    auto to = cpu_alias(out), from = cpu_alias(in);
    return run("allgather", {in}, {out}, options.asyncOp, [&] { return gloo_->_allgather_base(to, from, options); });
  }
  WorkPointer allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins, const c10d::AllgatherOptions& options) override {
    auto to = cpu(outs), from = cpu(ins);
    return run("allgather", ins, outs, options.asyncOp,
        [&] { return gloo_->allgather_into_tensor_coalesced(to, from, options); });
  }
  WorkPointer gather(std::vector<Tensors>& outs, Tensors& ins, const c10d::GatherOptions& options) override {
    auto to = cpu(outs);
    auto from = cpu(ins);
    return run("gather", ins, flat(outs), options.asyncOp, [&] { return gloo_->gather(to, from, options); });
  }
  WorkPointer scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ScatterOptions& options) override {
    auto to = cpu(outs);
    auto from = cpu(ins);
    return run("scatter", flat(ins), outs, options.asyncOp, [&] { return gloo_->scatter(to, from, options); });
  }
  WorkPointer reduce_scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ReduceScatterOptions& options) override {
    auto to = cpu(outs);
    auto from = cpu(ins);
    return run("reduce_scatter", flat(ins), outs, options.asyncOp, [&] { return gloo_->reduce_scatter(to, from, options); });
  }
  WorkPointer _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& options) override {
    auto to = cpu_alias(out), from = cpu_alias(in);
    return run("reduce_scatter", {in}, {out}, options.asyncOp, [&] { return gloo_->_reduce_scatter_base(to, from, options); });
  }
  WorkPointer reduce_scatter_tensor_coalesced(
      Tensors& outs, Tensors& ins, const c10d::ReduceScatterOptions& options) override {
    auto to = cpu(outs), from = cpu(ins);
    return run("reduce_scatter", ins, outs, options.asyncOp,
        [&] { return gloo_->reduce_scatter_tensor_coalesced(to, from, options); });
  }
  WorkPointer alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& out_rows, std::vector<int64_t>& in_rows,
                            const c10d::AllToAllOptions& options) override {
    auto to = cpu_alias(out), from = cpu_alias(in);
    return run("alltoall", {in}, {out}, options.asyncOp,
        [&] { return gloo_->alltoall_base(to, from, out_rows, in_rows, options); });
  }
  WorkPointer send(Tensors& tensors, int to, int tag) override {
    auto bytes = cpu(tensors);
    return run("send", tensors, {}, true, [&] { return gloo_->send(bytes, to, tag); });
  }
  WorkPointer recv(Tensors& tensors, int from, int tag) override {
    auto bytes = cpu(tensors);
    return run("recv", {}, tensors, true, [&] { return gloo_->recv(bytes, from, tag); });
  }
  WorkPointer barrier(const c10d::BarrierOptions& options) override {
    host_waits("barrier", current_slot(current_device));
    return gloo_->barrier(options);
  }

 private:
  // async: on the group's stream, after the caller's; otherwise on the caller's. `start` hands the bytes to gloo.
  template <class Start>
  WorkPointer run(const char* name, const Tensors& ins, const Tensors& outs, bool async, Start start) {
    const auto device = (ins.empty() ? outs : ins).at(0).device();
    for (auto all : {&ins, &outs})
      for (auto& tensor : *all)
        TORCH_CHECK(tensor.device().type() == kDevice && tensor.device() == device && tensor.is_contiguous(), name_, ": ", name,
                    " takes contiguous tensors of one device, not one on ", tensor.device());
    const int caller = current_slot(device.index()), slot = async ? slot_ : caller;
    const auto place = place_here();
    auto work = c10::make_intrusive<Work>();
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
    }
    work->slot = slot;
    work->device = device.index();
    work->tensors = ins;
    work->tensors.insert(work->tensors.end(), outs.begin(), outs.end());
    *work->inner = start();
    // Nobody else makes the bytes arrive where the host waits for the stream, and not for the work.
    work->pending = when_the_host_learns(slot, work->end.of(slot), [inner = work->inner] {
      if (auto unfinished = *inner) unfinished->wait();
      inner->reset();
    });
    return work;
  }

  static Tensors cpu(const Tensors& tensors) {
    Tensors all;
    for (auto& tensor : tensors) all.push_back(cpu_alias(tensor));
    return all;
  }
  static std::vector<Tensors> cpu(const std::vector<Tensors>& lists) {
    std::vector<Tensors> all;
    for (auto& list : lists) all.push_back(cpu(list));
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
};

}  // namespace simulated

PYBIND11_MODULE(_native, module) {
  using namespace simulated;
  module.def("start", [](int devices, bool mixing_raises, std::vector<std::string> foreign_files, py::object on_report) {
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
  module.def("place", [] { return *place_here(); });
  module.def("memory", [](int device) { return std::make_pair(bytes_of[device].now, bytes_of[device].peak); });
  module.def("reset_peak", [](int device) { bytes_of[device].peak = bytes_of[device].now; });
  module.def("generator", [](int device) { return default_generator(device); });
  module.def("backend", [](c10::intrusive_ptr<c10d::Backend> gloo, std::string name) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Backend>(std::move(gloo), std::move(name));
  });
}

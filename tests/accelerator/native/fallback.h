// Operators: the CPU's kernels on the same bytes, with the clocks' accesses, host waits and checks of devices around them.
#pragma once

#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/histc_ops.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace simulated {

// ---------------------------------------------------------------- aliases: the same bytes as tensors of the CPU, and back
inline c10::Storage cpu_storage(const c10::Storage& storage) {
  auto kept = new c10::Storage(storage);
  auto data = c10::DataPtr(const_cast<void*>(storage.data()), kept,
      [](void* context) { delete static_cast<c10::Storage*>(context); }, c10::Device(c10::kCPU));
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetCPUAllocator(), /*resizable=*/true);
}
inline Tensor tensor_over(const c10::Storage& storage, const Tensor& like, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}
inline Tensor cpu_alias_over(const c10::Storage& storage, const Tensor& tensor) {
  auto alias = tensor_over(storage, tensor, c10::DispatchKey::CPU);
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}
inline Tensor cpu_alias(const Tensor& tensor) { return cpu_alias_over(cpu_storage(tensor.storage()), tensor); }

// A result of a CPU kernel becomes a tensor of the device without a copy: memory of the device that keeps the CPU's storage.
inline Tensor adopt(const Tensor& result, int device) {
  auto storage = result.storage();
  auto data = own(const_cast<void*>(storage.data()), storage.nbytes(), device, storage);
  auto impl = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage.nbytes(), std::move(data), &allocator, /*resizable=*/true);
  return tensor_over(c10::Storage(impl), result, kKey);
}

inline void note(const Tensor& tensor, bool write, int slot, uint64_t epoch, const char* operation, Place place,
                 Findings& findings) {  // with the mutex held
  auto memory = allocation_of(tensor.storage().data_ptr());
  if (!memory || !tensor.numel()) return;
  int64_t first = tensor.storage_offset(), last = first;
  for (int d = 0; d < tensor.dim(); d++) (tensor.stride(d) > 0 ? last : first) += (tensor.size(d) - 1) * tensor.stride(d);
  const auto item = (int64_t)tensor.itemsize();
  touch(*memory, {first * item, (last + 1) * item, slot, epoch, write, operation, place}, findings);
}

// ---------------------------------------------------------------- any operator
// Their kernels on a device copy sizes or values to the host.
inline const std::unordered_set<std::string> kWaiting = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2",
    "aten::unique_dim", "aten::unique_consecutive", "aten::equal", "aten::bincount", "aten::repeat_interleave",
    "aten::linalg_eigh"};
// Their kernels on a device take indices of the host, and copy them.
inline const std::unordered_set<std::string> kTakesHostIndices = {
    "aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"};

inline bool is_mask(const Tensor& tensor) {
  return tensor.defined() && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte);
}

// One call of an operator. The device's tensors among its arguments become aliases on the CPU, its results become the device's.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), stack_(stack), schema_(op.schema()), name_(schema_.name()), waits_(kWaiting.count(name_)) {}

  void run() {
    for (size_t i = 0; i < schema_.arguments().size(); i++) convert(schema_.arguments()[i], at_end(schema_.arguments(), i));
    if (device_ < 0) device_ = current_device;
    refuse_mixed();
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    only_views_ = !schema_.returns().empty();
    for (size_t i = 0; i < schema_.returns().size(); i++) return_value(at_end(schema_.returns(), i));
    for (auto& argument : arguments_)
      if (argument.write) follow_resize(argument);
    if (!only_views_) note_accesses();
  }

 private:
  struct Argument {
    Tensor own, alias;
    bool write;
    const void* data;  // of the alias, before the kernel
  };

  c10::IValue& at_end(const std::vector<c10::Argument>& all, size_t i) { return (*stack_)[stack_->size() - all.size() + i]; }

  void convert(const c10::Argument& formal, c10::IValue& value) {
    const bool write = formal.alias_info() && formal.alias_info()->isWrite();
    if (value.isTensor()) {
      value = alias(value.toTensor(), write, false);
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& tensor : list) tensor = alias(tensor, write, false);
      value = c10::List<Tensor>(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const auto& tensor : value.toOptionalTensorVector())
        list.push_back(tensor && tensor->defined() ? alias(*tensor, write, true) : tensor);
      value = list;
    } else if (value.isDevice() && value.toDevice().type() == kDevice) {
      device_ = Guard::index(value.toDevice());
      value = c10::Device(c10::kCPU);
    } else if (value.isGenerator()) {
      auto generator = value.toGenerator();
      TORCH_CHECK(generator.device().type() == kDevice, "Expected a generator of ", c10::Device(kDevice), " but found one of ",
                  generator.device());
      value = of_next_kernel(generator);
    } else if (value.isNone() && formal.type()->kind() == c10::TypeKind::OptionalType &&
               formal.type()->castRaw<c10::OptionalType>()->getElementType()->kind() == c10::TypeKind::GeneratorType) {
      value = of_next_kernel(default_generator(device_));
    } else if (formal.name() == "output_size" && value.isInt()) {
      waits_ = false;  // repeat_interleave knows the size of its result
    }
  }

  Tensor alias(const Tensor& tensor, bool write, bool index) {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() != kDevice) {
      const bool takes = index && kTakesHostIndices.count(name_);
      if (takes) host_waits("copy h2d of an index", current_slot(current_device));
      // Kernels of devices take scalars of the host, as tensors without dimensions.
      if (tensor.device().is_cpu() && tensor.dim() > 0 && !takes) mixed_ = "a tensor on cpu";
      return tensor;
    }
    if (device_ >= 0 && device_ != tensor.device().index())
      mixed_ = "a tensor on " + tensor.device().str();
    else
      device_ = tensor.device().index();
    auto storage = tensor.storage().unsafeGetStorageImpl();
    auto made = storages_.find(storage);
    if (made == storages_.end()) made = storages_.emplace(storage, cpu_storage(tensor.storage())).first;
    arguments_.push_back({tensor, cpu_alias_over(made->second, tensor), write, tensor.storage().data()});
    return arguments_.back().alias;
  }

  // Most operators are TensorIterator's, which refuses by itself; this is for the others.
  void refuse_mixed() {
    if (mixed_.empty()) return;
    report("mixed", name_ + " got " + mixed_ + " beside " + c10::Device(kDevice, (c10::DeviceIndex)device_).str());
    TORCH_CHECK(!world.mixing_raises, "Expected all tensors to be on the same device, but ", name_, " got ", mixed_, " beside ",
                c10::Device(kDevice, (c10::DeviceIndex)device_));
  }

  void return_value(c10::IValue& value) {
    if (value.isTensor()) {
      value = returned(value.toTensor());
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& tensor : list) tensor = returned(tensor);
      value = c10::List<Tensor>(list);
    } else {
      only_views_ = false;
    }
  }

  Tensor returned(const Tensor& result) {  // an argument itself, a view of one, or fresh memory
    if (!result.defined()) return result;
    for (auto& argument : arguments_)
      if (argument.alias.is_same(result)) {
        only_views_ &= !argument.write;
        return argument.own;
      }
    for (auto& argument : arguments_)
      if (argument.alias.storage().is_alias_of(result.storage())) return tensor_over(argument.own.storage(), result, kKey);
    only_views_ = false;
    for (auto& [kernels, own] : fresh_)
      if (kernels.storage().is_alias_of(result.storage())) return tensor_over(own.storage(), result, kKey);
    fresh_.emplace_back(result, adopt(result, device_));
    return fresh_.back().second;
  }

  void follow_resize(Argument& argument) {
    auto storage = argument.alias.storage();
    auto own_storage = argument.own.storage().unsafeGetStorageImpl();
    const bool moved = storage.data() != argument.data || storage.nbytes() != own_storage->nbytes();
    if (moved && own_storage->data() == argument.data) {  // once for each storage
      own_storage->set_data_ptr(own(const_cast<void*>(storage.data()), storage.nbytes(), device_, storage));
      own_storage->set_nbytes(storage.nbytes());
    }
    if (argument.alias.sizes() != argument.own.sizes() || argument.alias.strides() != argument.own.strides())
      argument.own.unsafeGetTensorImpl()->set_sizes_and_strides(
          argument.alias.sizes(), argument.alias.strides(), argument.alias.storage_offset());
  }

  void note_accesses() {
    const auto place = place_here();
    const auto operation = schema_.name().c_str();  // of the registered schema, which outlives the call
    const int slot = current_slot(device_);
    {
      Findings findings;
      Lock lock(world.mutex);
      world.counts["operators"]++;
      const auto epoch = launch(slot);
      for (bool write : {false, true})
        for (auto& argument : arguments_)
          if (argument.write == write) note(argument.own, write, slot, epoch, operation, place, findings);
      for (auto& result : fresh_) note(result.second, true, slot, epoch, operation, place, findings);
    }
    if (waits_) host_waits(name_, slot);
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack* stack_;
  const c10::FunctionSchema& schema_;
  const std::string& name_;
  bool waits_;
  int device_ = -1;
  bool only_views_ = true;
  std::string mixed_;
  std::vector<Argument> arguments_;
  std::vector<std::pair<Tensor, Tensor>> fresh_;  // results that are new memory: the kernel's, and the device's
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;  // one alias for each storage
};

inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }

// ---------------------------------------------------------------- copies
inline Tensor rubbish_like(const Tensor& tensor) {
  auto rubbish = at::empty(tensor.sizes(), tensor.options());
  std::memset(rubbish.data_ptr(), kPoison, rubbish.nbytes());
  return rubbish;
}

inline void check_kept(const Tensor& source, const Tensor& then, Place place) {
  const auto now = source.contiguous();
  if (std::memcmp(then.data_ptr(), now.data_ptr(), then.nbytes()) != 0)
    report("reuse", "a pinned tensor changed before the host had waited for its copy to the device [" + *place + "]");
}

inline Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  const bool from = source.device().type() == kDevice, to = target.device().type() == kDevice;
  // Between devices, the copy runs on the source's stream, after the target's, which waits for it.
  const int slot = current_slot(from ? source.device().index() : target.device().index());
  const int target_slot = to ? current_slot(target.device().index()) : slot;
  const char* name = from && to ? "copy d2d" : from ? "copy d2h" : "copy h2d";
  const auto place = place_here();
  uint64_t epoch;
  {
    Findings findings;
    Lock lock(world.mutex);
    world.counts["operators"]++;
    world.counts[name]++;
    if (target_slot != slot) launch(slot), world.streams[slot].join(world.streams[target_slot]);
    epoch = launch(slot);
    if (from) note(source, false, slot, epoch, name, place, findings);
    if (to) note(target, true, slot, epoch, name, place, findings);
    if (target_slot != slot) launch(target_slot), world.streams[target_slot].join(world.streams[slot]);
  }
  auto source_bytes = from ? cpu_alias(source) : source, target_bytes = to ? cpu_alias(target) : target;
  const bool asynchronous = non_blocking && is_pinned((from ? target : source).storage().data());
  if (from && !to && asynchronous) {  // arrives when the host has waited; until then, whoever reads it reads rubbish
    auto staged = at::empty(target_bytes.sizes(), target_bytes.options()).copy_(source_bytes);
    target_bytes.copy_(rubbish_like(target_bytes));
    when_the_host_learns(slot, epoch, [target_bytes, staged] { target_bytes.copy_(staged); });
    return target;
  }
  target_bytes.copy_(source_bytes);
  if (from && to) return target;
  if (asynchronous) {
    auto then = at::empty(source.sizes(), source.options()).copy_(source);
    when_the_host_learns(slot, epoch, [source, then, place] { check_kept(source, then, place); });
  } else {
    host_waits(non_blocking ? std::string(name) + " of memory that is not pinned" : name, slot);
  }
  return target;
}

inline Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

// ---------------------------------------------------------------- memory and views
using Layout = std::optional<c10::Layout>;
using Sizes = c10::SymIntArrayRef;

inline Tensor empty(Sizes size, std::optional<c10::ScalarType> dtype, Layout, std::optional<c10::Device> device,
                    std::optional<bool> pin, std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard on(device.value_or(c10::Device(kDevice)));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &allocator, c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype), format);
}
inline Tensor empty_strided(Sizes size, Sizes stride, std::optional<c10::ScalarType> dtype, Layout,
                            std::optional<c10::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard on(device.value_or(c10::Device(kDevice)));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
      c10::DispatchKeySet(kKey), c10::dtype_or_default(dtype));
}

void Hooks::resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const {
  auto impl = storage.unsafeGetStorageImpl();
  const auto kept = std::min(bytes, impl->nbytes());
  if (bytes == impl->nbytes()) return;
  c10::DeviceGuard on(storage.device());
  auto fresh = allocator.allocate(bytes);
  if (kept) {
    std::memcpy(fresh.get(), storage.data(), kept);
    const int slot = current_slot(storage.device().index());
    const auto place = place_here();
    Findings findings;
    Lock lock(world.mutex);
    const auto epoch = launch(slot);
    for (auto& [data, write] : {std::pair(&impl->mutable_data_ptr(), false), std::pair(&fresh, true)})
      if (auto memory = allocation_of(*data))
        touch(*memory, {0, (int64_t)kept, slot, epoch, write, "resize", place}, findings);
  }
  impl->set_data_ptr(std::move(fresh));
  impl->set_nbytes(bytes);
}

inline const Tensor& resize_(const Tensor& self, Sizes size, std::optional<c10::MemoryFormat> format) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  const auto elements = c10::multiply_integers(sizes);
  const auto bytes = size_t((elements + self.storage_offset()) * (int64_t)self.itemsize());
  if (elements && bytes > self.storage().nbytes()) Hooks().resizePrivateUse1Bytes(self.storage(), bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  if (format && *format != c10::MemoryFormat::Preserve) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}
inline Tensor as_strided(const Tensor& self, Sizes size, Sizes stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}
inline Tensor view(const Tensor& self, Sizes size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }
inline Tensor reshape_alias(const Tensor& self, Sizes size, Sizes stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
inline Tensor unfold(const Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(self, dim, size, step);
}
inline Tensor& set_storage(Tensor& self, c10::Storage source, c10::SymInt offset, Sizes size, Sizes stride) {
  auto impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return self;
}
inline Tensor& set_whole_storage(Tensor& self, c10::Storage source) {
  auto impl = self.unsafeGetTensorImpl();
  const auto elements = int64_t(source.nbytes() / self.itemsize());
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(0);
  impl->set_sizes_contiguous({elements});
  return self;
}
inline Tensor& set_tensor(Tensor& self, const Tensor& source) {
  auto impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source.storage());
  impl->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return self;
}
inline void record_stream(Tensor& self, c10::Stream stream) { record_stream_of(self.storage().data_ptr(), stream); }

// ---------------------------------------------------------------- operators that differ on devices
inline int64_t sdp_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                          std::optional<double>, bool) {
  return 0;  // torch's mathematical form, of operators that the device has
}

// Devices count integers, the CPU does not, and transformers' mixtures of experts ask for that on devices only.
inline Tensor histogram(const Tensor& self, int64_t bins, const c10::Scalar& low, const c10::Scalar& high) {
  if (self.is_floating_point()) return at::native::call_fallback_fn<&fallback, at::_ops::histc>::call(self, bins, low, high);
  return histogram(self.to(at::kDouble), bins, low, high).to(self.scalar_type());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", TORCH_FN(empty));
  library.impl("empty_strided", TORCH_FN(empty_strided));
  library.impl("resize_", TORCH_FN(resize_));
  library.impl("as_strided", TORCH_FN(as_strided));
  library.impl("view", TORCH_FN(view));
  library.impl("unfold", TORCH_FN(unfold));
  library.impl("_reshape_alias", TORCH_FN(reshape_alias));
  library.impl("_copy_from", TORCH_FN(copy_from));
  library.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  library.impl("set_.source_Storage", TORCH_FN(set_whole_storage));
  library.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  library.impl("record_stream", TORCH_FN(record_stream));
  library.impl("_fused_sdp_choice", TORCH_FN(sdp_choice));
  library.impl("histc", TORCH_FN(histogram));
  // A device has a kernel of its own; torch's composite one would copy the offsets to the host, a wait that no device has.
  library.impl("_grouped_mm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace simulated

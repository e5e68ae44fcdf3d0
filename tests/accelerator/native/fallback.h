// Operators: the CPU's kernels on the same bytes, with the clocks' accesses, host waits and checks of devices around them.
#pragma once

#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_foreach_copy_ops.h>
#include <ATen/ops/convolution_backward_ops.h>
#include <ATen/ops/convolution_ops.h>
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
      value = alias(value.toTensor(), write);
    } else if (value.isTensorList()) {
      auto list = value.toTensorVector();
      for (auto& tensor : list) tensor = alias(tensor, write);
      value = c10::List<Tensor>(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const auto& tensor : value.toOptionalTensorVector())
        list.push_back(tensor && tensor->defined() ? index(*tensor, write) : tensor);
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
    } else if (formal.name() == "is_causal" && value.isBool()) {
      causal_ = value.toBool();
    }
  }

  // Indices may be the host's: a device copies them. Masks become numbers, whose count the host must know, but for a mask that
  // gets one value, which is filled. For reading, torch has done both, by operators of their own, before this is called.
  Tensor index(const Tensor& tensor, bool write) {
    const bool assigns = name_ == "aten::_index_put_impl_";
    if (tensor.device().is_cpu()) {
      if (assigns) host_waits("copy h2d", current_slot(current_device));
      return tensor;
    }
    waits_ |= assigns && is_mask(tensor) && at_end(schema_.arguments(), 2).toTensor().numel() != 1;
    return alias(tensor, write);
  }

  Tensor alias(const Tensor& tensor, bool write) {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() != kDevice) {  // kernels of devices take scalars of the host, as tensors without dimensions
      if (tensor.device().is_cpu() && tensor.dim() > 0) mixed_ = "a tensor on cpu";
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

  // Of products and of attention, of which a causal one computes half; other operators take the time of their bytes.
  double flops() const {
    const bool backward = name_ == "aten::_scaled_dot_product_flash_attention_for_cpu_backward";
    if (backward || name_ == "aten::_scaled_dot_product_flash_attention_for_cpu") {
      const auto &query = arguments_.at(backward).own, &key = arguments_.at(backward + 1).own;
      const double products = (backward ? 5.0 : 2.0) / (causal_ ? 2.0 : 1.0);
      return 2.0 * products * double(query.numel()) * double(key.size(2));
    }
    const bool added = name_ == "aten::addmm" || name_ == "aten::baddbmm";
    if (!added && name_ != "aten::mm" && name_ != "aten::bmm" && name_ != "aten::_grouped_mm") return 0;
    return 2.0 * double(arguments_.at(added).own.numel()) * double(arguments_.at(added + 1).own.size(-1));
  }
  // Of a tensor that repeats one in memory, that one counts.
  static double bytes_of_one(const Tensor& tensor) { return double(std::min(tensor.nbytes(), tensor.storage().nbytes())); }
  double bytes() const {
    double all = 0;
    for (auto& argument : arguments_) all += bytes_of_one(argument.own);
    for (auto& result : fresh_) all += bytes_of_one(result.second);
    return all;
  }

  void note_accesses() {
    const auto place = place_here();
    const auto timeline = timeline_now();
    const double seconds = timeline ? timeline->operators(name_, flops(), bytes()) : 0;  // may ask Python: not with the mutex
    const auto operation = schema_.name().c_str();  // of the registered schema, which outlives the call
    const int slot = current_slot(device_);
    {
      Findings findings;
      Lock lock(world.mutex);
      world.counts["launches"]++;
      const auto epoch = launch(slot);
      for (bool write : {false, true})
        for (auto& argument : arguments_)
          if (argument.write == write) note(argument.own, write, slot, epoch, operation, place, findings);
      for (auto& result : fresh_) note(result.second, true, slot, epoch, operation, place, findings);
      if (timeline) spend(*timeline, slot, operation, seconds);
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
  bool causal_ = false;  // of an attention
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
  if (!source.numel()) return target;  // as everywhere in torch, nothing is launched
  const bool from = source.device().type() == kDevice, to = target.device().type() == kDevice;
  // Between devices, the copy runs on the source's stream, after the target's, which waits for it.
  const int slot = current_slot(from ? source.device().index() : target.device().index());
  const int target_slot = to ? current_slot(target.device().index()) : slot;
  const char* name = from && to ? "copy d2d" : from ? "copy d2h" : "copy h2d";
  const auto place = place_here();
  const auto timeline = timeline_now();
  const double seconds = timeline ? timeline->operators(name, 0, double(source.nbytes() + target.nbytes())) : 0;
  uint64_t epoch;
  {
    Findings findings;
    Lock lock(world.mutex);
    world.counts["launches"]++;
    world.counts[name]++;
    if (target_slot != slot) launch(slot), world.streams[slot].join(world.streams[target_slot]);
    epoch = launch(slot);
    if (from) note(source, false, slot, epoch, name, place, findings);
    if (to) note(target, true, slot, epoch, name, place, findings);
    if (timeline) spend(*timeline, slot, name, seconds);
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
// The device's attention is one kernel, the CPU's, for the same arguments as on the CPU. torch's plain form of it, of a dozen
// operators, sums in another order.
inline int64_t attention_choice(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                                double dropout, bool causal, std::optional<double> scale, bool grouped) {
  const auto plain = static_cast<int64_t>(at::SDPBackend::math);
  if (!query.is_floating_point() || (mask && mask->defined() && mask->requires_grad())) return plain;
  std::optional<Tensor> cpu_mask;
  if (mask && mask->defined()) cpu_mask = mask->device().type() == kDevice ? cpu_alias(*mask) : *mask;
  const auto choice = at::_fused_sdp_choice(
      cpu_alias(query), cpu_alias(key), cpu_alias(value), cpu_mask, dropout, causal, scale, grouped);
  return choice == plain ? plain : static_cast<int64_t>(at::SDPBackend::overrideable);
}

using AttentionResult = std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;

inline AttentionResult attention(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                                 double dropout, bool causal, bool, std::optional<double> scale) {
  auto [out, log_sum] = at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, causal, mask, scale);
  return {out, log_sum, {}, {}, query.sym_size(2), key.sym_size(2), {}, {}, {}};
}

inline std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& mask, std::array<bool, 4>,
    const Tensor& out, const Tensor& log_sum, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, double dropout,
    bool causal, const Tensor&, const Tensor&, std::optional<double> scale) {
  auto [of_query, of_key, of_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(grad, query, key, value, out,
      log_sum, dropout, causal, mask.defined() ? std::optional<Tensor>(mask) : std::nullopt, scale);
  return {of_query, of_key, of_value, {}};
}

// torch's kernel for the CPU draws from the CPU's generator.
inline std::tuple<Tensor, Tensor> dropout(const Tensor& self, double p, std::optional<bool>) {
  auto kept = at::empty_like(self, self.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {at::mul(self, kept).mul_(p < 1 ? 1 / (1 - p) : 0.0), kept};
}

inline Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, Sizes stride,
                          Sizes padding, Sizes dilation, bool transposed, Sizes output_padding, c10::SymInt groups) {
  return at::native::call_fallback_fn_symint<&fallback, at::_ops::convolution>::call(
      input, weight, bias, stride, padding, dilation, transposed, output_padding, groups);
}
inline std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, Sizes stride, Sizes padding, Sizes dilation, bool transposed,
    Sizes output_padding, c10::SymInt groups, std::array<bool, 3> wanted) {
  return at::native::call_fallback_fn_symint<&fallback, at::_ops::convolution_backward>::call(grad, input, weight, std::nullopt,
      stride, padding, dilation, transposed, output_padding, groups, wanted);
}

// One launch, unless a tensor is the host's: then a copy for each.
inline void foreach_copy(at::TensorList targets, at::TensorList sources, bool non_blocking) {
  bool here = true;
  for (auto list : {targets, sources})
    for (auto& tensor : list) here &= tensor.device().type() == kDevice;
  if (here)
    at::native::call_fallback_fn<&fallback, at::_ops::_foreach_copy_>::call(targets, sources, non_blocking);
  else
    at::native::foreach_tensor_copy_list_kernel_slow_(targets, sources, non_blocking);
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
  library.impl("_scaled_dot_product_fused_attention_overrideable", TORCH_FN(attention));
  library.impl("_scaled_dot_product_fused_attention_overrideable_backward", TORCH_FN(attention_backward));
  library.impl("histc", TORCH_FN(histogram));
  library.impl("native_dropout", TORCH_FN(dropout));
  library.impl("convolution_overrideable", TORCH_FN(convolution));
  library.impl("convolution_backward_overrideable", TORCH_FN(convolution_backward));
  // A device has one kernel for each of these. torch has composites of several operators for devices that have none: they would
  // launch many; that of _grouped_mm would copy the offsets to the host, a wait that no device has; and where the CPU has a
  // kernel too, as for layer norms and the backward of silu, they round otherwise (2e-6 of the norm of a Llama's gradients).
  std::vector<std::string> kernels = {"_grouped_mm", "_chunk_cat", "_chunk_cat.out", "split_with_sizes_copy.out"};
  for (auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    auto op = c10::Dispatcher::singleton().findOp(name);
    if (!op || name.name.rfind("aten::", 0) != 0 || name.name == "aten::_foreach_copy_") continue;
    const bool composite = op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
        op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
    const bool replaced = composite && op->hasKernelForDispatchKey(c10::DispatchKey::CPU);
    if (replaced || name.name.rfind("aten::_foreach_", 0) == 0)
      kernels.push_back(name.overload_name.empty() ? name.name : name.name + "." + name.overload_name);
  }
  for (auto& name : kernels) library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  library.impl("_foreach_copy_", TORCH_FN(foreach_copy));
}

// Copies read lazily conjugated and negated tensors as they are, by flags of their aliases. torch would make a copy first, by a
// copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace simulated

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &simulated::attention_choice)
}

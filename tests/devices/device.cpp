// A pretended accelerator, "pretend": its tensors lie in the host's memory, and the CPU computes.
//
// Like a real one it refuses operands that are on another device, has its own generator, counts the
// memory that it hands out, and can be told to have no float64.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorShape.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <algorithm>
#include <map>

namespace {

constexpr auto KIND = c10::DeviceType::PrivateUse1;
const c10::Device DEVICE(KIND, 0);
const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

// -- memory ----------------------------------------------------------------------------------------

bool has_float64 = true;
size_t held = 0, peak = 0;

void took(size_t bytes) { peak = std::max(peak, held += bytes); }

struct Block {  // of memory, whoever has allocated it
  size_t bytes;
  void* own;
  at::Tensor kept;
};

void give_back(void* context) {
  auto* block = static_cast<Block*>(context);
  held -= block->bytes;
  if (block->own) c10::free_cpu(block->own);
  delete block;
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? c10::alloc_cpu(bytes) : nullptr;
    took(bytes);
    return {data, new Block{bytes, data, {}}, &give_back, DEVICE};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Memory memory;
REGISTER_ALLOCATOR(KIND, &memory);

void check_type(at::ScalarType type) {
  TORCH_CHECK_TYPE(has_float64 || type != at::kDouble,
                   "Cannot convert a tensor to float64: this device does not support it (pretended).");
}

// The same memory, seen as a tensor of the CPU for as long as an operator runs.
at::Tensor on_cpu(const at::Tensor& t) {
  if (!t.defined() || t.device().type() != KIND) return t;
  const auto bytes = t.storage().nbytes();
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes,
                       c10::DataPtr(t.storage().mutable_data(), c10::Device(at::kCPU)),
                       c10::GetAllocator(at::kCPU), /*resizable=*/true);
  auto seen = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  auto* impl = seen.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (t.is_conj()) seen._set_conj(true);
  if (t.is_neg()) seen._set_neg(true);
  return seen;
}

c10::DataPtr taken_over(const at::Tensor& t) {
  const auto bytes = t.storage().nbytes();
  took(bytes);
  return {t.storage().mutable_data(), new Block{bytes, nullptr, t}, &give_back, DEVICE};
}

// A new tensor of the CPU becomes one of the device.
at::Tensor on_device(const at::Tensor& t) {
  if (!t.defined() || t.device().type() == KIND) return t;
  check_type(t.scalar_type());
  c10::Storage storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(), taken_over(t), &memory, true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), KEYS, t.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  if (t.is_conj()) made._set_conj(true);
  if (t.is_neg()) made._set_neg(true);
  return made;
}

// -- the generator ---------------------------------------------------------------------------------

// Kernels of the CPU take a generator of the CPU only: `twin` is what they are given.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(uint64_t seed = c10::default_rng_seed_val)
      : GeneratorImpl(DEVICE, KEYS), twin(at::make_generator<at::CPUGeneratorImpl>(seed)) {}
  void set_current_seed(uint64_t seed) override { twin.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "no offset"); }
  uint64_t current_seed() const override { return twin.current_seed(); }
  uint64_t seed() override { return twin.seed(); }
  void set_state(const c10::TensorImpl& state) override { twin.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return twin.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator();
    copy->twin = twin.clone();
    return copy;
  }
  mutable at::Generator twin;
};

const at::Generator& default_generator() {
  static at::Generator one = at::make_generator<Generator>();
  return one;
}

at::Generator& twin_of(const at::Generator& generator) {
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->twin;
}

// Inside, the default generator of the CPU is that of the device.
struct DrawsOnDevice {
  at::Generator cpu = at::globalContext().defaultGenerator(c10::Device(at::kCPU));
  at::Tensor before = cpu.get_state();
  DrawsOnDevice() { cpu.set_state(twin_of(default_generator()).get_state()); }
  ~DrawsOnDevice() {
    twin_of(default_generator()).set_state(cpu.get_state());
    cpu.set_state(before);
  }
};

// -- the device ------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
  c10::Stream getDefaultStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
  c10::Stream exchangeStream(c10::Stream) const override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<Generator>(); }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  at::Device getDeviceFromPtr(void*) const override { return DEVICE; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(at::kCPU); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto fresh = memory.allocate(bytes);
    std::memcpy(fresh.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};
Hooks hooks;

// -- operators -------------------------------------------------------------------------------------

// Calls an operator on what its arguments are on the CPU, and brings results to the device.
struct Call {
  const c10::OperatorHandle& op;
  torch::jit::Stack* stack;
  std::map<c10::TensorImpl*, at::Tensor> given;  // by what it is on the CPU
  bool on_host = false, host_operands = false, host_generator = false, draws = false;

  at::Tensor down(const at::Tensor& t) {
    if (t.defined() && t.device().type() != KIND && t.dim()) host_operands = true;
    auto seen = on_cpu(t);
    if (seen.defined() && !seen.is_same(t)) given[seen.unsafeGetTensorImpl()] = t;
    return seen;
  }

  void argument(c10::IValue& value) {
    if (value.isTensor()) {
      value = down(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> each;
      for (const at::Tensor& t : value.toTensorVector()) each.push_back(down(t));
      value = each;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> each;
      for (std::optional<at::Tensor> t : value.toOptionalTensorVector())
        each.push_back(t ? std::optional<at::Tensor>(down(*t)) : t);
      value = each;
    } else if (value.isDevice()) {
      on_host = value.toDevice().type() != KIND;
      value = c10::Device(at::kCPU);
    } else if (value.isGenerator()) {
      draws = false;
      host_generator = value.toGenerator().device().type() != KIND;
      if (!host_generator) value = twin_of(value.toGenerator());
    }
  }

  at::Tensor up(const at::Tensor& t) {
    if (!t.defined()) return t;
    auto known = given.find(t.unsafeGetTensorImpl());
    if (known != given.end()) return known->second;
    return on_host ? t : on_device(t);
  }

  void result(c10::IValue& value) {
    if (value.isTensor()) {
      value = up(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> each;
      for (const at::Tensor& t : value.toTensorVector()) each.push_back(up(t));
      value = each;
    }
  }

  // An argument that the operator has resized: `out`.
  void follow(const at::Tensor& t, c10::TensorImpl* seen) {
    if (seen->storage().data() != t.storage().data()) {
      auto kept = at::Tensor(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(seen));
      t.storage().unsafeGetStorageImpl()->set_data_ptr(taken_over(kept));
      t.storage().unsafeGetStorageImpl()->set_nbytes(seen->storage().nbytes());
    }
    if (seen->sizes() != t.sizes() || seen->strides() != t.strides())
      t.unsafeGetTensorImpl()->set_sizes_and_strides(seen->sizes(), seen->strides(), seen->storage_offset());
  }

  void run() {
    const auto& schema = op.schema();
    const size_t first = stack->size() - schema.arguments().size();
    draws = op.hasTag(at::Tag::nondeterministic_seeded);
    for (size_t i = first; i < stack->size(); ++i) argument((*stack)[i]);
    TORCH_CHECK(!host_generator || on_host, "Expected a 'pretend' generator but found one of the CPU.");
    const auto& name = schema.name();  // an index may be on the CPU: it is copied
    if (host_operands && !given.empty() && name.find("aten::index") && name.find("aten::_index_put"))
      TORCH_CHECK(false, "Expected all tensors to be on the same device, but ", name,
                  " met one of the CPU and one of pretend:0.");
    std::vector<at::Tensor> kept;  // while the stack does not hold them
    for (auto& [seen, t] : given) kept.emplace_back(c10::intrusive_ptr<c10::TensorImpl>::reclaim_copy(seen));
    {
      std::optional<DrawsOnDevice> inside;
      if (draws) inside.emplace();
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    }
    for (auto& [seen, t] : given) follow(t, seen);
    for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) result((*stack)[i]);
  }
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call{op, stack, {}}.run(); }

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  check_type(c10::dtype_or_default(type));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, KEYS, c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> type,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  check_type(c10::dtype_or_default(type));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
                                           KEYS, c10::dtype_or_default(type));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  on_cpu(to).copy_(on_cpu(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) at::native::resize_impl_cpu_(to.unsafeGetTensorImpl(), from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Scalar number(const at::Tensor& self) { return on_cpu(self).item(); }

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto shape = C10_AS_INTARRAYREF_SLOW(size);
  const size_t bytes = (c10::multiply_integers(shape) + self.storage_offset()) * self.itemsize();
  if (self.storage().nbytes() < bytes) hooks.resizePrivateUse1Bytes(self.storage(), bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(shape);
  return self;
}

at::Tensor as_strided(const at::Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt);
}

at::Tensor view(const at::Tensor& t, c10::SymIntArrayRef size) {
  return at::native::view(t, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& t, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_part(at::Tensor& t, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                     c10::SymIntArrayRef stride) {
  t.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  t.unsafeGetTensorImpl()->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                                 offset.guard_int(__FILE__, __LINE__));
  return t;
}

at::Tensor& set_storage(at::Tensor& t, at::Storage storage) {
  const int64_t length = storage.nbytes() / t.itemsize();
  t.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  t.unsafeGetTensorImpl()->set_sizes_contiguous(length);
  return t;
}

at::Tensor& set_tensor(at::Tensor& t, const at::Tensor& from) {
  t.unsafeGetTensorImpl()->set_storage_keep_dtype(from.storage());
  t.unsafeGetTensorImpl()->set_sizes_and_strides(from.sizes(), from.strides(), from.storage_offset());
  return t;
}

at::Tensor zeros_without_memory(c10::SymIntArrayRef size, std::optional<at::ScalarType> type,
                                std::optional<at::Layout> layout, std::optional<at::Device> device,
                                std::optional<bool> pinned) {
  return empty(size, type, layout, device, pinned, std::nullopt).zero_();
}

using Bias = std::optional<at::Tensor>;
using Sizes = c10::SymIntArrayRef;

at::Tensor convolution(const at::Tensor& x, const at::Tensor& weight, const Bias& bias, Sizes stride, Sizes padding,
                       Sizes dilation, bool transposed, Sizes output_padding, c10::SymInt groups) {
  return on_device(at::convolution_symint(on_cpu(x), on_cpu(weight), bias ? Bias(on_cpu(*bias)) : bias, stride,
                                          padding, dilation, transposed, output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& back, const at::Tensor& x, const at::Tensor& weight, Sizes stride, Sizes padding, Sizes dilation,
    bool transposed, Sizes output_padding, c10::SymInt groups, std::array<bool, 3> mask) {
  at::OptionalSymIntArrayRef bias;
  std::array<c10::SymInt, 1> channels{back.sym_size(1)};
  if (mask[2]) bias = Sizes(channels);
  auto [to_x, to_weight, to_bias] =
      at::convolution_backward_symint(on_cpu(back), on_cpu(x), on_cpu(weight), bias, stride, padding, dilation,
                                      transposed, output_padding, groups, mask);
  return {on_device(to_x), on_device(to_weight), on_device(to_bias)};
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_efficientzerotensor", zeros_without_memory);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", number);
  m.impl("resize_", resize);
  m.impl("as_strided", as_strided);
  m.impl("unfold", at::native::unfold);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_part);
  m.impl("set_.source_Tensor", set_tensor);
}

// What torch's Python does not show of a device: its default generator.
TORCH_LIBRARY(pretend, m) {
  m.def("rng_state() -> Tensor", []() { return twin_of(default_generator()).get_state(); });
  m.def("set_rng_state(Tensor state) -> ()",
        [](const at::Tensor& state) { twin_of(default_generator()).set_state(state); });
  m.def("manual_seed(int seed) -> ()",
        [](int64_t seed) { twin_of(default_generator()).set_current_seed(static_cast<uint64_t>(seed)); });
}

extern "C" {
void start() { at::RegisterPrivateUse1HooksInterface(&hooks); }
void allow_float64(int allowed) { has_float64 = allowed; }
size_t bytes_held() { return held; }
size_t bytes_at_peak() { return peak; }
void forget_peak() { peak = held; }
}

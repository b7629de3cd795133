// The device as torch sees it: guard, memory, copies, and every operator. An operator is queued on the current stream and runs
// there on the host's memory; where its result's shape or value is needed at once, the stream is waited for first.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <set>

#include "runtime.h"
#include "torch_device.h"

namespace sim {

constexpr auto kType = c10::DeviceType::PrivateUse1;

namespace {

bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType;
}

int index_of(c10::Device device) {
  return device.has_index() ? device.index() : current_device();
}

// --- streams and events ---

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device getDevice() const override { return {kType, static_cast<c10::DeviceIndex>(current_device())}; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(c10::Device device) const override { set_device(index_of(device)); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { set_device(index_of(device)); }
  c10::Stream getStream(c10::Device device) const override { return as_stream(device, current_stream(index_of(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return as_stream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return as_stream(device, new_stream(index_of(device)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return as_stream(stream.device(), exchange_stream(index_of(stream.device()), static_cast<int>(stream.id())));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<MarkPtr*>(event); }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    MarkPtr mark = sim::record(index_of(stream.device()), static_cast<int>(stream.id()));
    if (*event == nullptr) {
      *event = new MarkPtr(mark);
    } else {
      *static_cast<MarkPtr*>(*event) = mark;
    }
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      wait_for(index_of(stream.device()), static_cast<int>(stream.id()), *static_cast<MarkPtr*>(event));
    }
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) {
      return true;
    }
    const MarkPtr mark = *static_cast<MarkPtr*>(event);
    check(mark->device);
    return mark->done.load();
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      synchronize_mark(*static_cast<MarkPtr*>(event));
    }
  }
  bool queryStream(const c10::Stream& stream) const override {
    return idle(index_of(stream.device()), static_cast<int>(stream.id()));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize(index_of(stream.device()), static_cast<int>(stream.id()));
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    synchronize_device(device < 0 ? current_device() : device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    if (memory.get_context() != nullptr) {
      used_on(static_cast<Block*>(memory.get_context()), static_cast<int>(stream.id()));
    }
  }
  static c10::Stream as_stream(c10::Device device, int id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, static_cast<c10::DeviceIndex>(index_of(device))), id);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// --- memory ---

void give_back(void* block) {
  try {
    release(static_cast<Block*>(block));
  } catch (const std::exception&) { // the device has failed: its memory is lost with it
  }
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    const int device = current_device();
    if (bytes == 0) {
      return {nullptr, nullptr, &give_back, {kType, static_cast<c10::DeviceIndex>(device)}};
    }
    Block* block = sim::allocate(device, bytes);
    return {pointer(block), block, &give_back, {kType, static_cast<c10::DeviceIndex>(device)}};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* into, const void* from, std::size_t bytes) const override {
    synchronize(current_device(), current_stream(current_device()));
    default_copy_data(into, from, bytes);
  }
};

Memory memory;
REGISTER_ALLOCATOR(kType, &memory);

// Host memory that the device may read and write while the host does something else.
std::mutex pinned_mutex;
std::map<const char*, std::size_t> pinned;
std::multimap<std::size_t, void*> free_pinned; // kept, as torch keeps it: what is pinned anew may wait for the device

void unpin(void* start) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  free_pinned.emplace(pinned[static_cast<const char*>(start)], start);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    const std::size_t size = (bytes + 63) / 64 * 64 + 64;
    {
      std::lock_guard<std::mutex> lock(pinned_mutex);
      if (auto kept = free_pinned.find(size); kept != free_pinned.end()) {
        void* start = kept->second;
        free_pinned.erase(kept);
        return {start, start, &unpin, c10::DeviceType::CPU};
      }
    }
    add_count(kSegments);
    if (trait(kAllocSyncs)) {
      synchronize_device(current_device());
    }
    void* start = std::aligned_alloc(64, size);
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned[static_cast<const char*>(start)] = size;
    return {start, start, &unpin, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* into, const void* from, std::size_t bytes) const override {
    default_copy_data(into, from, bytes);
  }
};

PinnedMemory pinned_memory;

bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto after = pinned.upper_bound(static_cast<const char*>(address));
  if (after == pinned.begin()) {
    return false;
  }
  --after;
  return static_cast<const char*>(address) < after->first + after->second;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = getCurrentDevice();
    set_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  at::Device getDeviceFromPtr(void*) const override { return {kType, static_cast<c10::DeviceIndex>(current_device())}; }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t bytes) const override {
    const int device = index_of(storage.device());
    const c10::DeviceGuard guard(c10::Device(kType, static_cast<c10::DeviceIndex>(device)));
    auto* impl = storage.unsafeGetStorageImpl();
    c10::DataPtr grown = memory.allocate(bytes);
    const void* from = impl->data();
    void* into = grown.get();
    const std::size_t kept = std::min<std::size_t>(bytes, impl->nbytes());
    if (kept) {
      launch(device, current_stream(device), [from, into, kept] { std::memcpy(into, from, kept); });
    }
    impl->set_data_ptr_noswap(std::move(grown));
    impl->set_nbytes(bytes);
  }
};

// --- tensors ---

at::Tensor empty(
    c10::IntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool>,
    std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(c10::Device(kType)));
  return at::detail::empty_generic(
      size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(c10::Device(kType)));
  return at::detail::empty_strided_generic(
      size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  if (self.numel() != 0) { // the host copies what was there
    const int device = index_of(self.device());
    synchronize(device, current_stream(device), kFallbackWaits);
  }
  return at::native::resize_(self, size, format);
}

void set_sizes(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr || stride.size() != size.size()) {
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride);
  }
}

at::Tensor& set_storage_offset(
    at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  set_sizes(self, std::move(source), offset, size, stride);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const auto numel = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  set_sizes(self, std::move(source), 0, {numel}, {});
  return self;
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  set_sizes(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
  return self;
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  Guard().recordDataPtrOnStream(self.storage().data_ptr(), stream);
}

} // namespace

at::Tensor on_host(const at::Tensor& tensor) {
  if (!is_ours(tensor)) {
    return tensor;
  }
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), at::TensorOptions().dtype(tensor.scalar_type()));
}

namespace {

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& into, bool non_blocking) {
  const at::Tensor& ours = is_ours(source) ? source : into;
  const int device = index_of(ours.device());
  const int stream = current_stream(device);
  if (source.numel() == 0) {
    return into;
  }
  load_kernel(device, "copy");
  const bool from_host = !is_ours(source), to_host = !is_ours(into);
  const at::Tensor& host = from_host ? source : into;
  const bool in_background = non_blocking && is_pinned(host.data_ptr());
  // What lies in pageable memory is read before the call returns.
  at::Tensor from = from_host && !in_background ? source.clone() : on_host(source);
  at::Tensor to = on_host(into);
  launch(device, stream, [from, to]() mutable {
    const at::NoGradGuard no_grad;
    to.copy_(from);
  });
  if ((from_host || to_host) && !in_background) {
    synchronize(device, stream);
  }
  return into;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& into) {
  if (!into.sizes().equals(source.sizes())) {
    into.resize_(source.sizes());
  }
  return copy_from(source, into, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  const int device = index_of(self.device());
  synchronize(device, current_stream(device));
  return at::_local_scalar_dense(on_host(self));
}

// --- every other operator ---

c10::IValue mapped(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& change) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? c10::IValue(change(value.toTensor())) : value;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorVector()) {
      list.push_back(change(each));
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorVector()) {
      list.push_back(each && each->defined() ? std::optional<at::Tensor>(change(*each)) : each);
    }
    return list;
  }
  return value;
}

void each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& look) {
  mapped(value, [&](const at::Tensor& tensor) {
    look(tensor);
    return tensor;
  });
}

// What a queued operator works on: the device's memory, and of the host's what it was when the operator was called.
c10::IValue as_queued(const c10::IValue& value) {
  return mapped(value, [](const at::Tensor& tensor) {
    const bool number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
    return is_ours(tensor) ? on_host(tensor) : number || tensor.is_meta() ? tensor : tensor.clone();
  });
}

c10::IValue as_meta(const c10::IValue& value) {
  return mapped(value, [](const at::Tensor& tensor) {
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number() || !is_ours(tensor)) {
      return tensor;
    }
    return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(c10::DeviceType::Meta));
  });
}

enum class Kind { kInPlace, kNew, kWaits };

Kind kind_of(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  if (schema.name() == "aten::native_layer_norm" || schema.name() == "aten::native_batch_norm") {
    return Kind::kWaits; // of 16-bit values the host keeps other statistics than torch expects of a device
  }
  if (op.hasTag(at::Tag::nondeterministic_seeded)) {
    return Kind::kWaits; // the host's random numbers are drawn in the order of the calls
  }
  bool in_place = true, fresh = true;
  for (const auto& each : schema.returns()) {
    const bool alias = each.alias_info() != nullptr;
    in_place = in_place && alias && each.alias_info()->isWrite();
    fresh = fresh && !alias && (each.type()->isSubtypeOf(*c10::TensorType::get()));
  }
  for (const auto& each : schema.arguments()) {
    fresh = fresh && !(each.alias_info() != nullptr && each.alias_info()->isWrite());
  }
  return in_place ? Kind::kInPlace : fresh ? Kind::kNew : Kind::kWaits;
}

void run_queued(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  const at::NoGradGuard no_grad;
  try {
    op.callBoxed(stack);
  } catch (const c10::Error& error) {
    throw std::runtime_error(toString(op.operator_name()) + ": " + error.what_without_backtrace());
  }
}

std::mutex without_meta_mutex;
std::set<std::string> without_meta; // operators whose result's shape nobody can say beforehand

bool shapes_of(const c10::OperatorHandle& op, const torch::jit::Stack& arguments, torch::jit::Stack& shapes) {
  const std::string name = toString(op.operator_name());
  {
    std::lock_guard<std::mutex> lock(without_meta_mutex);
    if (without_meta.count(name)) {
      return false;
    }
  }
  for (const auto& value : arguments) {
    shapes.push_back(value.isDevice() ? c10::IValue(c10::Device(c10::DeviceType::Meta)) : as_meta(value));
  }
  try {
    op.callBoxed(shapes);
    return true;
  } catch (const std::exception&) {
    std::lock_guard<std::mutex> lock(without_meta_mutex);
    without_meta.insert(name);
    return false;
  }
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::size_t count = schema.arguments().size();
  const torch::jit::Stack arguments = torch::jit::pop(*stack, count);
  int device = -1;
  bool empty_out = false;
  for (std::size_t place = 0; place < count; place++) {
    each_tensor(arguments[place], [&](const at::Tensor& tensor) {
      device = device < 0 && is_ours(tensor) ? index_of(tensor.device()) : device;
      empty_out = empty_out || (schema.arguments()[place].is_out() && tensor.numel() == 0);
    });
    if (arguments[place].isDevice() && arguments[place].toDevice().type() == kType && device < 0) {
      device = index_of(arguments[place].toDevice());
    }
  }
  device = device < 0 ? current_device() : device;
  const c10::Device here(kType, static_cast<c10::DeviceIndex>(device));
  const c10::DeviceGuard guard(here);
  const int stream = current_stream(device);
  const std::string name = toString(op.operator_name());
  load_kernel(device, name);
  Kind kind = kind_of(op);
  if (torch::jit::Stack sizes; empty_out && kind == Kind::kInPlace && shapes_of(op, arguments, sizes)) {
    for (std::size_t result = 0; result < sizes.size(); result++) {
      for (std::size_t place = 0; place < count; place++) {
        const auto* alias = schema.arguments()[place].alias_info();
        if (alias != nullptr && alias->beforeSets() == schema.returns()[result].alias_info()->beforeSets()) {
          arguments[place].toTensor().resize_(sizes[result].toTensor().sizes());
        }
      }
    }
  } else if (empty_out) {
    kind = Kind::kWaits;
  }

  if (kind == Kind::kInPlace) {
    torch::jit::Stack queued;
    for (const auto& value : arguments) {
      queued.push_back(as_queued(value));
    }
    launch(device, stream, [op, queued]() mutable { run_queued(op, queued); });
    for (const auto& each : schema.returns()) {
      for (std::size_t place = 0; place < count; place++) {
        const auto* alias = schema.arguments()[place].alias_info();
        if (alias != nullptr && alias->beforeSets() == each.alias_info()->beforeSets()) {
          torch::jit::push(*stack, arguments[place]);
        }
      }
    }
    return;
  }

  torch::jit::Stack shapes;
  if (kind == Kind::kNew && shapes_of(op, arguments, shapes)) {
    torch::jit::Stack queued;
    for (const auto& value : arguments) {
      queued.push_back(value.isDevice() ? c10::IValue(c10::Device(c10::DeviceType::CPU)) : as_queued(value));
    }
    std::vector<at::Tensor> results;
    for (const auto& shape : shapes) {
      at::Tensor result;
      if (shape.toTensor().defined()) {
        const auto& like = shape.toTensor();
        result = at::empty_strided(like.sizes(), like.strides(), like.options().device(here));
        results.push_back(on_host(result));
      } else {
        results.emplace_back();
      }
      torch::jit::push(*stack, result);
    }
    launch(device, stream, [op, queued, results]() mutable {
      run_queued(op, queued);
      const at::NoGradGuard no_grad;
      for (std::size_t place = 0; place < results.size(); place++) {
        if (results[place].defined()) {
          const at::Tensor& found = queued[place].toTensor();
          TORCH_CHECK(
              found.scalar_type() == results[place].scalar_type() && found.sizes() == results[place].sizes(),
              "sim: ", op.schema().name(), " gave another type or shape than was expected of a device");
          results[place].copy_(found);
        }
      }
    });
    return;
  }

  // The result's shape, or a random number, is needed now.
  synchronize(device, stream, kFallbackWaits);
  torch::jit::Stack now;
  for (std::size_t place = 0; place < count; place++) {
    const auto& value = arguments[place];
    const bool fresh = schema.arguments()[place].is_out();
    now.push_back(
        value.isDevice() ? c10::IValue(c10::Device(c10::DeviceType::CPU))
                         : mapped(value, [&](const at::Tensor& tensor) {
                             return fresh && tensor.numel() == 0
                                 ? at::empty({0}, at::TensorOptions().dtype(tensor.scalar_type()))
                                 : on_host(tensor);
                           }));
  }
  {
    torch::jit::Stack running = now;
    run_queued(op, running);
    std::swap(now, running); // now: results; running: consumed
  }
  for (std::size_t place = 0; place < schema.returns().size(); place++) {
    const auto* alias = schema.returns()[place].alias_info();
    if (alias == nullptr) {
      torch::jit::push(*stack, mapped(now[place], [&](const at::Tensor& result) {
        at::Tensor ours = at::empty_strided(result.sizes(), result.strides(), result.options().device(here));
        copy_from(result, ours, false);
        return ours;
      }));
      continue;
    }
    TORCH_CHECK(alias->isWrite(), "sim: ", name, " returns a view; register it as a kernel of its own");
    for (std::size_t argument = 0; argument < count; argument++) {
      const auto* own = schema.arguments()[argument].alias_info();
      if (own == nullptr || own->beforeSets() != alias->beforeSets()) {
        continue;
      }
      if (schema.arguments()[argument].is_out() && arguments[argument].toTensor().numel() == 0) {
        copy_from_and_resize(now[place].toTensor(), arguments[argument].toTensor());
      }
      torch::jit::push(*stack, arguments[argument]);
    }
  }
}

} // namespace

void register_hooks() {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("resize_", resize);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", record_stream);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

} // namespace sim

// Operators: each runs on the CPU's kernels over the same bytes, and says what it has read and written.
#include "sim.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <cstring>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

namespace sim {
namespace {

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor over(const c10::Storage& storage, c10::DispatchKey key, const at::Tensor& like) {
  auto tensor = at::detail::make_tensor<at::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return tensor;
}

// The device's generator in the place of the CPU's default one, while a kernel runs.
class GeneratorLoan {
 public:
  explicit GeneratorLoan(c10::DeviceIndex device)
      : cpu_(at::detail::getDefaultCPUGenerator().get<at::CPUGeneratorImpl>()),
        lent_generator_(inner_generator(default_generator(device))),
        lent_(lent_generator_.get<at::CPUGeneratorImpl>()),
        lock_(lent_->mutex_) {
    swap();
  }
  ~GeneratorLoan() { swap(); }

 private:
  void swap() {
    const auto engine = cpu_->engine();
    const auto next_float = cpu_->next_float_normal_sample();
    const auto next_double = cpu_->next_double_normal_sample();
    cpu_->set_engine(lent_->engine());
    cpu_->set_next_float_normal_sample(lent_->next_float_normal_sample());
    cpu_->set_next_double_normal_sample(lent_->next_double_normal_sample());
    lent_->set_engine(engine);
    lent_->set_next_float_normal_sample(next_float);
    lent_->set_next_double_normal_sample(next_double);
  }
  at::CPUGeneratorImpl* cpu_;
  at::Generator lent_generator_;
  at::CPUGeneratorImpl* lent_;
  std::unique_lock<std::mutex> lock_;
};

// One call of an operator: its arguments as the CPU sees them, and its results as the device does.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), schema_(op.schema()), stack_(stack), doing_(schema_.name().c_str()) {
    refuse_fork();
  }

  void run() {
    lower_arguments();
    refuse_mixed_devices();
    {
      at::AutoDispatchBelowADInplaceOrView below;
      std::optional<GeneratorLoan> loan;
      if (!has_generator_ && op_.hasTag(at::Tag::nondeterministic_seeded)) loan.emplace(device().index());
      op_.callBoxed(stack_);
    }
    take_over_outputs();
    raise_results();
    note_accesses();
  }

 private:
  struct Argument {
    at::Tensor sim, cpu;
    bool is_written;
  };

  c10::Device device() const {
    const auto device = device_.value_or(asked_.value_or(c10::Device(kDevice, current_device)));
    return device.has_index() ? device : c10::Device(kDevice, current_device);
  }

  void lower_arguments() {
    const auto count = schema_.arguments().size();
    for (size_t i = 0; i < count; i++) {
      const auto* alias = schema_.arguments()[i].alias_info();
      lower((*stack_)[stack_->size() - count + i], alias && alias->isWrite());
    }
  }

  void lower(c10::IValue& value, bool is_written) {
    if (value.isTensor()) {
      value = lower(value.toTensor(), is_written);
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> tensors;
      for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(lower(tensor, is_written));
      value = c10::IValue(tensors);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> tensors;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
        tensors.push_back(tensor ? std::optional<at::Tensor>(lower(*tensor, is_written)) : tensor);
      value = tensors;
    } else if (value.isDevice()) {
      asked_ = value.toDevice();
      if (asked_->type() == kDevice) value = c10::Device(c10::kCPU);
    } else if (value.isGenerator()) {
      has_generator_ = true;
      if (value.toGenerator().device().type() == kDevice)
        value = inner_generator(value.toGenerator());
      else
        has_host_generator_ = true;
    }
  }

  at::Tensor lower(const at::Tensor& tensor, bool is_written) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_privateuseone()) {
      has_host_tensor_ |= tensor.dim() > 0 && tensor.is_cpu();
      return tensor;
    }
    TORCH_CHECK(!device_ || *device_ == tensor.device(), "Expected all tensors to be on the same device, but found ",
                *device_, " and ", tensor.device(), " in ", doing());
    device_ = tensor.device();
    for (auto& argument : arguments_)
      if (argument.sim.is_same(tensor)) {
        argument.is_written |= is_written;
        return argument.cpu;
      }
    arguments_.push_back({tensor, as_cpu(tensor), is_written});
    return arguments_.back().cpu;
  }

  void refuse_mixed_devices() const {
    // As CUDA does: indices may lie on the host, and what is copied.
    static const std::set<std::string> kMayMix = {
        "aten::index",  "aten::_unsafe_index",       "aten::index_put",  "aten::index_put_",
        "aten::copy_",  "aten::_unsafe_index_put",   "aten::_copy_from", "aten::_index_put_impl_",
        "aten::set_",   "aten::_copy_from_and_resize"};
    TORCH_CHECK(kMayMix.count(doing()) || !has_host_tensor_ || arguments_.empty(),
                "Expected all tensors to be on the same device, but found at least two devices, sim and cpu, in ", doing());
    TORCH_CHECK(!has_host_generator_ || device().type() != kDevice,
                "Expected a 'sim' device type for generator but found 'cpu' in ", doing());
  }

  // A kernel may have given an output another size, or new memory.
  void take_over_outputs() {
    for (auto& [sim, cpu, is_written] : arguments_) {
      if (!is_written) continue;
      if (cpu.storage().data() != real(sim.storage().data())) {
        resize(sim.storage(), cpu.storage().nbytes());
        std::memcpy(real(sim.storage().data()), cpu.storage().data(), cpu.storage().nbytes());
      }
      if (sim.sizes() != cpu.sizes() || sim.strides() != cpu.strides())
        sim.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
    }
  }

  void raise_results() {
    const auto count = schema_.returns().size();
    for (size_t i = stack_->size() - count; i < stack_->size(); i++) {
      auto& value = (*stack_)[i];
      if (value.isTensor()) {
        value = raise(value.toTensor());
      } else if (value.isTensorList()) {
        std::vector<at::Tensor> tensors;
        for (const at::Tensor& tensor : value.toTensorVector()) tensors.push_back(raise(tensor));
        value = c10::IValue(tensors);
      } else {
        tells_host_ = true;  // a number: the host waits for it
      }
    }
  }

  at::Tensor raise(const at::Tensor& cpu) {
    if (!cpu.defined()) return cpu;
    for (const auto& argument : arguments_)
      if (argument.cpu.is_same(cpu)) return argument.sim;
    auto* memory = cpu.storage().unsafeGetStorageImpl();
    for (const auto& argument : arguments_)
      if (argument.cpu.storage().unsafeGetStorageImpl() == memory) return as_sim(argument.sim.storage(), cpu);
    if (!adopted_.count(memory)) adopted_.emplace(memory, adopt(cpu.storage(), device().index()));
    results_.push_back(as_sim(adopted_.at(memory), cpu));
    return results_.back();
  }

  void note_accesses() {
    bool writes = !results_.empty();
    for (const auto& argument : arguments_) writes |= argument.is_written;
    if (!writes && !tells_host_) return;  // a view
    std::unique_lock lock(mutex);
    const int lane = current_lane(device().index());
    const auto when = begin(lane);
    for (const auto& argument : arguments_) note_access(argument.sim, lane, when, argument.is_written);
    for (const auto& result : results_) note_access(result, lane, when, true);
    lock.unlock();
    if (tells_host_) host_waits_for(clock_of(lane));
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack* stack_;
  Doing doing_;
  std::vector<Argument> arguments_;
  std::vector<at::Tensor> results_;  // in new memory
  std::unordered_map<c10::StorageImpl*, c10::Storage> adopted_;
  std::optional<c10::Device> device_, asked_;
  bool has_host_tensor_ = false, has_generator_ = false, has_host_generator_ = false, tells_host_ = false;
};

// -- what is no kernel: memory, copies, storages -----------------------------------------------------

void refuse_pinned(std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  refuse_pinned(pin);
  const c10::DeviceGuard guard(device.value_or(c10::Device(kDevice, current_device)));
  return at::detail::empty_generic(size, device_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool> pin) {
  refuse_pinned(pin);
  const c10::DeviceGuard guard(device.value_or(c10::Device(kDevice, current_device)));
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kKeys, c10::dtype_or_default(dtype));
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  const size_t bytes = (self.storage_offset() + self.numel()) * self.itemsize();
  if (bytes > self.storage().nbytes()) resize(self.storage(), bytes);
  return self;
}

void wait_for_each_other(int lane, int other) {  // as current streams do for a copy between devices
  advance(lane, clock_of(other));
  advance(other, clock_of(lane));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const Doing now("copy");
  const bool to_host = to.is_cpu(), from_host = from.is_cpu(), crosses = to_host != from_host;
  const auto source = from_host ? from : as_cpu(from), target = to_host ? to : as_cpu(to);
  const int lane = current_lane((to_host ? from : to).device().index());
  std::unique_lock lock(mutex);
  const bool is_between_devices = !crosses && from.device() != to.device();
  const int other = is_between_devices ? current_lane(from.device().index()) : lane;
  if (is_between_devices) wait_for_each_other(lane, other);
  const auto when = begin(lane);
  if (is_between_devices) advance(other, clock_of(lane));  // before its memory is used again
  note_access(from, lane, when, false);
  note_access(to, lane, when, true);
  const auto& host = to_host ? target : source;
  if (crosses) order_copies(host, lane);
  const bool is_later = non_blocking && crosses && from.numel() && to.numel() && is_pinned(host.data_ptr());
  lock.unlock();  // the CPU's kernel may start threads
  at::AutoDispatchBelowADInplaceOrView below;
  const auto numbers = is_later && to_host ? at::empty_strided(to.sizes(), to.strides(), target.options()) : target;
  if (is_later && to_host) {  // torch conjugates and negates on the host, where nothing is yet
    source._set_conj(to.is_conj());
    source._set_neg(to.is_neg());
  }
  numbers.copy_(source);
  if (is_later)
    start_copy(host, to_host ? numbers : source, to_host, lane, when);
  else if (crosses)
    host_waits_for(clock_of(lane));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Tensor& set_storage_offset(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
                               at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.data() || size.empty()) {
    impl->set_sizes_and_strides(size, stride, offset);
  } else {
    impl->set_sizes_contiguous(size);
    impl->set_storage_offset(offset);
  }
  const auto bytes = at::detail::computeStorageNbytes(size, self.strides(), self.itemsize(), offset);
  if (bytes > self.storage().nbytes()) resize(self.storage(), bytes);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source) {
  const int64_t size = source.nbytes() / self.itemsize();
  return set_storage_offset(self, std::move(source), 0, {size}, {int64_t(1)});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage_offset(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, self.device()), device_allocator(), true);
  return set_storage_offset(self, storage, 0, {int64_t(0)}, {int64_t(1)});
}

void record_stream_of(at::Tensor& self, at::Stream stream) {
  record_stream(self.storage().data_ptr(), lane_of(stream));
}

// A parameter stays the same object when its module is moved, as with the devices that torch knows.
bool is_compatible(const at::Tensor& self, const at::Tensor& from) {
  auto is_dense = [](const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided && (tensor.is_cpu() || tensor.is_privateuseone());
  };
  return self.key_set() == from.key_set() || (is_dense(self) && is_dense(from));
}

// Attention by plain mathematics: the other choices are kernels for one kind of device.
int64_t choose_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                         double, bool, std::optional<double>, bool) {
  return 0;
}

}  // namespace

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }

at::Tensor as_cpu(const at::Tensor& tensor) {
  c10::DataPtr bytes(real(tensor.storage().data()), c10::Device(c10::kCPU));
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(bytes),
                       at::getCPUAllocator(), true);
  auto cpu = over(storage, c10::DispatchKey::CPU, tensor);
  if (tensor.is_conj()) cpu._set_conj(true);
  if (tensor.is_neg()) cpu._set_neg(true);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) cpu.unsafeGetTensorImpl()->set_wrapped_number(true);
  return cpu;
}

at::Tensor as_sim(const c10::Storage& storage, const at::Tensor& like) {
  return over(storage, c10::DispatchKey::PrivateUse1, like);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage_offset);
  m.impl("set_", &set_nothing);
  m.impl("record_stream", &record_stream_of);
  m.impl("_fused_sdp_choice", &choose_attention);
  m.impl("_has_compatible_shallow_copy_type", &is_compatible);
  // torch takes these apart by the kind of device, and knows this one not: the CPU's way.
  for (const char* name : {"convolution", "convolution_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

// They see the views of a copy as they are; torch's fallback would copy them first, for ever.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace sim

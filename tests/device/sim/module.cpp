// What Python sees of the stand-in device; `sim/__init__.py` makes torch's device module of it.
#include "sim.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

namespace sim {
void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack);
void register_hooks();
void define_collectives(pybind11::module_& module);

// Where an operator has a kernel for CPUs and one made of others, torch would take the latter, and
// its numbers differ.
void use_cpu_kernels(const std::vector<std::string>& names) {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (const auto& name : names) library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

// Newer releases of torch have it: what autograd does with operators that it has no rule for.
void add_autograd_fallback() {
  constexpr auto key = c10::DispatchKey::AutogradPrivateUse1;
  if (c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(key)) return;
  static torch::Library library(torch::Library::IMPL, "_", key, __FILE__, __LINE__);
  library.fallback(torch::autograd::basicAutogradNotImplementedFallback());
}
}  // namespace sim

// What autocast does with each operator: torch's own lists.
#define SIM_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SIM_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SIM_FP32_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define SIM_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

namespace at::autocast {
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(SIM_LOWER)
  AT_FORALL_FP32(SIM_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(SIM_FP32_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(SIM_PROMOTE)
}
}  // namespace at::autocast

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  sim::register_hooks();
  sim::add_autograd_fallback();
  sim::define_collectives(module);
  module.def("use_cpu_kernels", &sim::use_cpu_kernels);
  module.def("device_count", &sim::device_count);
  module.def("is_used", &sim::is_used);
  module.def("default_generator", [](int device) { return sim::default_generator(c10::DeviceIndex(device)); });
  module.def("take_reports", &sim::take_reports);
  module.def("waits", &sim::waits);
  module.def("fail_late", &sim::fail_late);
  module.def("set_stream_delay", &sim::set_stream_delay);
  module.def("set_limit", [](int device, int64_t bytes) { sim::set_limit(c10::DeviceIndex(device), bytes); });
  module.def("bytes_held", [](int device) { return sim::bytes_held(c10::DeviceIndex(device)); });
  module.def("bytes_at_peak", [](int device) { return sim::bytes_at_peak(c10::DeviceIndex(device)); });
  module.def("reset_peak", [](int device) { sim::reset_peak(c10::DeviceIndex(device)); });
}

// apply(number, *arguments): an operator's forward and its node in autograd's graph, without
// Python, where the same costs as much as a small kernel. It carries out a plan that Python has
// made; what the plan means is written at _autograd.Rule, which carries it out for all other calls.
#include "apply.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <deque>
#include <optional>

namespace tfm_kernels {
namespace {

using c10::IValue;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Stack = torch::jit::Stack;

enum SourceKind : int64_t { kArgument, kOutput, kGradient, kNeed };

struct Known {
  Plan plan;
  c10::OperatorHandle forward;
  std::optional<c10::OperatorHandle> backward;
};

std::deque<Known>& known() {
  static std::deque<Known> plans;  // grows at import; a reference into it stays good
  return plans;
}

bool is_tensor_type(const c10::Argument& argument) {
  const auto& type = argument.type();
  return type->kind() == c10::TypeKind::TensorType ||
         (type->kind() == c10::TypeKind::OptionalType &&
          type->castRaw<c10::OptionalType>()->getElementType()->kind() ==
              c10::TypeKind::TensorType);
}

bool is_defined(const IValue& value) { return value.isTensor() && value.toTensor().defined(); }

// As PyTorch calls the kernels of its own operators: what a kernel returns is no view that autograd
// keeps track of, whatever it was made of.
void call(const c10::OperatorHandle& op, Stack& stack) {
  const at::AutoDispatchBelowADInplaceOrView below;
  op.callBoxed(stack);
}

class Fused : public torch::autograd::Function<Fused> {
 public:
  // autograd reads `tensors`, those among the arguments in *stack; their order is that of the
  // node's edges
  static variable_list forward(AutogradContext* ctx, at::TensorList /*tensors*/, int64_t number,
                               Stack* stack) {
    const Known& rule = known()[number];
    const Plan& plan = rule.plan;
    const Stack arguments = *stack;
    call(rule.forward, *stack);

    std::vector<int64_t> places;  // argument -> its number among `tensors`, or -1
    int64_t count = 0;
    for (const IValue& argument : arguments) places.push_back(is_defined(argument) ? count++ : -1);
    const auto& slots = rule.backward->schema().arguments();
    variable_list saved;
    // the plan's number, the places, the backward's arguments that are no tensors: a list, because
    // that is what compiled autograd can read
    c10::impl::GenericList kept(c10::AnyType::get());
    kept.reserve(1 + places.size() + plan.sources.size());
    kept.push_back(number);
    for (const int64_t place : places) kept.push_back(place);
    for (size_t i = 0; i < plan.sources.size(); ++i) {
      const auto [kind, index] = plan.sources[i];
      if (kind != kArgument && kind != kOutput) continue;
      IValue value = kind == kArgument ? arguments[index] : (*stack)[index];
      if (kind == kOutput)
        if (const auto* stand_in = absent(plan, index, places)) value = arguments[*stand_in];
      if (is_tensor_type(slots[i]))
        saved.push_back(value.isTensor() ? value.toTensor() : at::Tensor());
      else
        kept.push_back(std::move(value));
    }
    ctx->save_for_backward(std::move(saved));
    ctx->saved_data["call"] = std::move(kept);
    ctx->set_materialize_grads(false);
    // the others go past autograd: marking them is what compiled autograd cannot read
    variable_list outputs;
    for (const int64_t output : plan.differentiable) outputs.push_back((*stack)[output].toTensor());
    return outputs;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& douts) {
    const auto list = ctx->saved_data["call"].toList();
    const std::vector<IValue> kept = list.vec();
    const Known& rule = known()[kept[0].toInt()];
    const Plan& plan = rule.plan;
    std::vector<int64_t> places;
    for (size_t i = 0; i < rule.forward.schema().arguments().size(); ++i)
      places.push_back(kept[1 + i].toInt());
    const auto needs = [&](int64_t argument) {
      return places[argument] >= 0 && ctx->needs_input_grad(places[argument]);
    };

    const auto tensors = std::count_if(places.begin(), places.end(), [](auto p) { return p >= 0; });
    variable_list gradients(tensors + 2);  // none for `number` and `stack`
    if (std::none_of(douts.begin(), douts.end(), [](const auto& t) { return t.defined(); }))
      return gradients;

    const auto& slots = rule.backward->schema().arguments();
    const variable_list saved = ctx->get_saved_variables();
    auto tensor = saved.begin();
    auto other = kept.begin() + 1 + places.size();
    Stack stack;
    for (size_t i = 0; i < plan.sources.size(); ++i) {
      const auto [kind, index] = plan.sources[i];
      if (kind == kNeed) {
        stack.emplace_back(needs(index));
      } else if (kind == kGradient) {
        const auto& all = plan.differentiable;
        const at::Tensor& dout = douts[std::find(all.begin(), all.end(), index) - all.begin()];
        const bool asked = dout.defined() && !absent(plan, index, places);
        stack.push_back(asked ? IValue(dout) : IValue());
      } else if (is_tensor_type(slots[i])) {
        stack.push_back(tensor->defined() ? IValue(*tensor) : IValue());
        ++tensor;
      } else {
        stack.push_back(*other++);
      }
    }
    if (stack[0].isNone()) stack[0] = at::zeros_like(stack[plan.like].toTensor());
    // while a double backward is recorded, the operator itself must refuse it
    if (at::GradMode::is_enabled())
      rule.backward->callBoxed(stack);
    else
      call(*rule.backward, stack);

    for (size_t i = 0; i < plan.targets.size(); ++i) {
      const auto [argument, shared] = plan.targets[i];
      if (!needs(argument)) continue;
      const bool shares = shared >= 0 && stack[i].toTensor().numel() == 0;
      gradients[places[argument]] = stack[shares ? shared : i].toTensor();
    }
    return gradients;
  }

 private:
  // Where the argument that this output needs was not given: the argument that stands for it.
  static const int64_t* absent(const Plan& plan, int64_t output,
                               const std::vector<int64_t>& places) {
    for (const auto& entry : plan.absent)
      if (entry[0] == output && places[entry[1]] < 0) return &entry[2];
    return nullptr;
  }
};

// Pushes what a parameter of this type takes; false for anything else.
bool push(PyObject* part, const c10::Type& type, Stack& stack) {
  switch (type.kind()) {
    case c10::TypeKind::OptionalType:
      if (part == Py_None) return stack.emplace_back(), true;
      return push(part, *type.castRaw<c10::OptionalType>()->getElementType(), stack);
    case c10::TypeKind::TensorType: {
      const at::Tensor* tensor = exact_tensor(part);
      if (tensor != nullptr) stack.emplace_back(*tensor);
      return tensor != nullptr;
    }
    case c10::TypeKind::BoolType:
      if (!PyBool_Check(part)) return false;
      stack.emplace_back(part == Py_True);
      return true;
    case c10::TypeKind::FloatType:
      if (!PyFloat_CheckExact(part)) return false;
      stack.emplace_back(PyFloat_AS_DOUBLE(part));
      return true;
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType: {
      if (!PyLong_CheckExact(part)) return false;
      int overflow = 0;
      stack.emplace_back(static_cast<int64_t>(PyLong_AsLongLongAndOverflow(part, &overflow)));
      return overflow == 0;
    }
    case c10::TypeKind::ListType: {
      if (!PyTuple_CheckExact(part) && !PyList_CheckExact(part)) return false;
      c10::List<int64_t> numbers;
      for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(part); ++i) {
        Stack one;
        if (!push(PySequence_Fast_GET_ITEM(part, i), *c10::IntType::get(), one)) return false;
        numbers.push_back(one[0].toInt());
      }
      stack.emplace_back(std::move(numbers));
      return true;
    }
    default:
      return false;
  }
}

bool is_plain() {
  return !c10::impl::TorchDispatchModeTLS::any_modes_set() &&
         !at::impl::torch_function_mode_enabled() && !torch::jit::tracer::isTracing();
}

}  // namespace

int64_t add_plan(Plan plan) {
  auto& dispatcher = c10::Dispatcher::singleton();
  const auto find = [&](const std::string& name) {
    return dispatcher.findSchemaOrThrow(name.c_str(), "");
  };
  std::optional<c10::OperatorHandle> backward;
  if (!plan.backward.empty()) backward = find(plan.backward);
  c10::OperatorHandle forward = find(plan.forward);
  known().push_back({std::move(plan), std::move(forward), std::move(backward)});
  return static_cast<int64_t>(known().size()) - 1;
}

const at::Tensor* exact_tensor(PyObject* part) {
  return THPVariable_CheckExact(part) ? &THPVariable_Unpack(part) : nullptr;
}

PyObject* apply(PyObject* /*module*/, PyObject* const* parts, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  const int64_t number = PyLong_AsLongLong(parts[0]);
  const Known& rule = known()[number];
  const auto& parameters = rule.forward.schema().arguments();
  if (count - 1 != static_cast<Py_ssize_t>(parameters.size()) || !is_plain())
    Py_RETURN_NOTIMPLEMENTED;
  Stack stack;
  stack.reserve(parameters.size());
  variable_list tensors;
  bool records = false, tangents = false;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!push(parts[i + 1], *parameters[i].type(), stack)) Py_RETURN_NOTIMPLEMENTED;
    if (!is_defined(stack.back())) continue;
    tensors.push_back(stack.back().toTensor());
    records = records || tensors.back().requires_grad();
    tangents = tangents || tensors.back()._fw_grad(0).defined();
  }
  records = records && at::GradMode::is_enabled();
  if (records && !rule.backward) Py_RETURN_NOTIMPLEMENTED;
  TORCH_CHECK_NOT_IMPLEMENTED(!tangents, rule.forward.schema().name(),
                              " knows no forward-mode differentiation; PyTorch's own operators do");
  {
    const pybind11::gil_scoped_release no_gil;
    if (records) {
      const variable_list outputs = Fused::apply(at::TensorList(tensors), number, &stack);
      for (size_t i = 0; i < outputs.size(); ++i) stack[rule.plan.differentiable[i]] = outputs[i];
    } else {
      call(rule.forward, stack);
    }
  }
  if (stack.size() == 1) return THPVariable_Wrap(stack[0].toTensor());
  PyObject* result = PyTuple_New(static_cast<Py_ssize_t>(stack.size()));
  if (result == nullptr) return nullptr;
  for (size_t i = 0; i < stack.size(); ++i)
    PyTuple_SET_ITEM(result, static_cast<Py_ssize_t>(i), THPVariable_Wrap(stack[i].toTensor()));
  return result;
  END_HANDLE_TH_ERRORS
}

PyObject* shaped_like(PyObject* /*module*/, PyObject* const* parts, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  const at::Tensor *y = count == 2 ? exact_tensor(parts[0]) : nullptr, *x = nullptr;
  if (y != nullptr) x = exact_tensor(parts[1]);
  if (x == nullptr || x->dim() == 0 || !is_plain()) Py_RETURN_NOTIMPLEMENTED;
  c10::SmallVector<int64_t, 8> sizes(x->sizes().begin(), x->sizes().end());
  sizes.back() = y->size(-1);
  if (y->requires_grad()) return THPVariable_Wrap(y->view(sizes));
  const at::AutoDispatchBelowADInplaceOrView untracked;
  return THPVariable_Wrap(y->view(sizes));
  END_HANDLE_TH_ERRORS
}

}  // namespace tfm_kernels

// Objects and functions of Python over C++ values, with little to compile: torch's and pybind11's
// own headers for this take longer than all of the extension.
//
// A function of C++ becomes one of Python by `method<f>`: its parameters say how each argument is
// converted (`From`), its result how it comes back (`To`). A `std::optional` parameter may be left
// out or be None.
#pragma once

#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>

#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Generator.h>

#include <ATen/core/TensorBody.h>

#include "core.h"

// Of <torch/csrc/autograd/python_variable.h>.
TORCH_PYTHON_API extern PyObject* THPVariableClass;
TORCH_PYTHON_API PyObject* THPVariable_Wrap(const at::TensorBase& var);

namespace neuron::bind {

// A reference to an object of Python that is let go of with the GIL.
class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* owned) : object_(owned) {
    if (owned == nullptr) throw_set();
  }
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() { Py_XDECREF(object_); }
  static Ref borrow(PyObject* object) { return Ref(Py_NewRef(object)); }

  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

  // Throws the error that Python has set, through C++, in the way that torch passes on.
  [[noreturn]] static void throw_set() {
    python_error error;
    error.persist();
    throw error;
  }

 private:
  PyObject* object_ = nullptr;
};

class WithGil {
 public:
  WithGil();
  ~WithGil() { PyGILState_Release(state_); }
  WithGil(const WithGil&) = delete;

 private:
  PyGILState_STATE state_;
};

// -- conversions --------------------------------------------------------------------------------

template <class T>
struct Object { // of Python, over a value
  PyObject_HEAD
  T value;
};
template <class T>
PyTypeObject* type_of = nullptr; // set by `add_type`

template <class T, class = void>
struct From { // an object over a value
  static T& load(PyObject* object) {
    if (!PyObject_TypeCheck(object, type_of<T>)) {
      PyErr_Format(
          PyExc_TypeError, "%s is expected, not %s", type_of<T>->tp_name, Py_TYPE(object)->tp_name);
      Ref::throw_set();
    }
    return reinterpret_cast<Object<T>*>(object)->value;
  }
};

template <class T>
struct From<T, std::enable_if_t<std::is_integral_v<T> && !std::is_same_v<T, bool>>> {
  static T load(PyObject* object) {
    const Ref index(PyNumber_Index(object));
    const long long found = PyLong_AsLongLong(index.get());
    if (found == -1 && PyErr_Occurred()) Ref::throw_set();
    return static_cast<T>(found);
  }
};
template <>
struct From<uintptr_t> {
  static uintptr_t load(PyObject* object) {
    const auto found = reinterpret_cast<uintptr_t>(PyLong_AsVoidPtr(object));
    if (found == 0 && PyErr_Occurred()) Ref::throw_set();
    return found;
  }
};
template <>
struct From<bool> {
  static bool load(PyObject* object) {
    const int found = PyObject_IsTrue(object);
    if (found < 0) Ref::throw_set();
    return found;
  }
};
template <>
struct From<double> {
  static double load(PyObject* object) {
    const double found = PyFloat_AsDouble(object);
    if (found == -1 && PyErr_Occurred()) Ref::throw_set();
    return found;
  }
};
template <>
struct From<std::string> {
  static std::string load(PyObject* object) {
    const char* found = PyUnicode_AsUTF8(object);
    if (found == nullptr) Ref::throw_set();
    return found;
  }
};
template <>
struct From<PyObject*> {
  static PyObject* load(PyObject* object) { return object; }
};
template <>
struct From<at::ScalarType> {
  static at::ScalarType load(PyObject* object) {
    TORCH_CHECK_TYPE(THPDtype_Check(object), "a torch.dtype is expected");
    return reinterpret_cast<THPDtype*>(object)->scalar_type;
  }
};

// Where a torch.Tensor keeps its TensorImpl, which differs between versions of torch: looked for
// once. `_cdata` says the same, slowly.
inline ptrdiff_t find_impl(PyObject* tensor, const void* impl) {
  for (const ptrdiff_t offset : {sizeof(PyObject), sizeof(PyObject) + sizeof(void*)}) {
    const void* found = *reinterpret_cast<void**>(reinterpret_cast<char*>(tensor) + offset);
    if (found == impl) return offset;
  }
  return -1;
}
inline bool is_tensor_object(PyObject* object) {
  if (Py_TYPE(object) == reinterpret_cast<PyTypeObject*>(THPVariableClass)) return true;
  return PyObject_IsInstance(object, THPVariableClass) == 1;
}
template <>
struct From<at::Tensor> {
  static at::Tensor load(PyObject* object) {
    static ptrdiff_t offset = -2;
    if (!is_tensor_object(object)) {
      PyErr_Format(PyExc_TypeError, "a tensor is expected, not %s", Py_TYPE(object)->tp_name);
      Ref::throw_set();
    }
    void* impl;
    if (offset >= 0) {
      impl = *reinterpret_cast<void**>(reinterpret_cast<char*>(object) + offset);
    } else {
      const Ref address(PyObject_GetAttrString(object, "_cdata"));
      impl = PyLong_AsVoidPtr(address.get());
      if (offset == -2) offset = find_impl(object, impl);
    }
    return at::Tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(
        static_cast<c10::TensorImpl*>(impl)));
  }
};
template <>
struct From<Ticket> {
  static Ticket load(PyObject* object) {
    TORCH_CHECK_TYPE(
        PyTuple_Check(object) && PyTuple_GET_SIZE(object) == 2, "a ticket is expected");
    return {
        From<int64_t>::load(PyTuple_GET_ITEM(object, 0)),
        From<int64_t>::load(PyTuple_GET_ITEM(object, 1))};
  }
};
template <class T>
struct From<std::vector<T>> {
  static std::vector<T> load(PyObject* object) {
    const Ref items(PySequence_Fast(object, "a sequence is expected"));
    std::vector<T> found;
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(items.get());
    found.reserve(static_cast<size_t>(count));
    for (Py_ssize_t i = 0; i < count; i++)
      found.push_back(From<T>::load(PySequence_Fast_GET_ITEM(items.get(), i)));
    return found;
  }
};
template <class T>
struct From<std::optional<T>> {
  static std::optional<T> load(PyObject* object) {
    if (object == nullptr || object == Py_None) return {};
    return From<T>::load(object);
  }
};

inline PyObject* to_python(PyObject* owned) { return owned; }
inline PyObject* to_python(bool value) { return PyBool_FromLong(value); }
inline PyObject* to_python(int value) { return PyLong_FromLong(value); }
inline PyObject* to_python(int64_t value) { return PyLong_FromLongLong(value); }
inline PyObject* to_python(size_t value) { return PyLong_FromSize_t(value); }
inline PyObject* to_python(double value) { return PyFloat_FromDouble(value); }
inline PyObject* to_python(const char* value) { return PyUnicode_FromString(value); }
inline PyObject* to_python(const std::string& value) {
  return PyUnicode_FromStringAndSize(value.data(), static_cast<Py_ssize_t>(value.size()));
}
inline PyObject* to_python(const at::Tensor& value) { return THPVariable_Wrap(value); }
PyObject* to_python(Ticket); // a Ticket of port.py

// A new object over a value.
template <class T>
PyObject* wrap(T value) {
  auto* made = reinterpret_cast<Object<T>*>(type_of<T>->tp_alloc(type_of<T>, 0));
  if (made == nullptr) Ref::throw_set();
  new (&made->value) T(std::move(value));
  return reinterpret_cast<PyObject*>(made);
}
template <class T>
PyObject* to_python(const std::vector<T>& values);
template <class T>
PyObject* to_python(const c10::intrusive_ptr<T>& value) {
  return value ? wrap(value) : Py_NewRef(Py_None);
}
template <class T>
PyObject* to_python(const std::shared_ptr<T>& value) {
  return value ? wrap(value) : Py_NewRef(Py_None);
}
template <class T>
PyObject* to_python(const std::optional<T>& value) {
  return value.has_value() ? to_python(*value) : Py_NewRef(Py_None);
}
template <class T>
PyObject* to_python(const std::vector<T>& values) {
  Ref list(PyList_New(static_cast<Py_ssize_t>(values.size())));
  for (size_t i = 0; i < values.size(); i++) {
    PyObject* item = to_python(values[i]);
    if (item == nullptr) Ref::throw_set();
    PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(i), item);
  }
  return list.release();
}
template <class... T>
PyObject* tuple(const T&... values) {
  Ref made(PyTuple_New(sizeof...(T)));
  Py_ssize_t i = 0;
  auto put = [&](PyObject* item) {
    if (item == nullptr) Ref::throw_set();
    PyTuple_SET_ITEM(made.get(), i++, item);
  };
  (put(to_python(values)), ...);
  return made.release();
}

// -- functions ----------------------------------------------------------------------------------

// Sets what is being thrown as Python's error.
void set_error() noexcept;

template <class F>
struct Signature;
template <class R, class... A>
struct Signature<R (*)(A...)> {
  using Arguments = std::tuple<A...>;
  static constexpr size_t count = sizeof...(A);
};

template <class T>
constexpr bool is_optional = false;
template <class T>
constexpr bool is_optional<std::optional<T>> = true;

template <auto f, class A, size_t... i>
PyObject* apply(PyObject* const* arguments, std::index_sequence<i...>) {
  auto run = [&]() -> decltype(auto) {
    return f(From<std::decay_t<std::tuple_element_t<i, A>>>::load(arguments[i])...);
  };
  if constexpr (std::is_void_v<decltype(run())>) {
    run();
    Py_RETURN_NONE;
  } else {
    return to_python(run());
  }
}

// The names of the parameters (but `self`) for calls with keywords, as "lane command after".
struct Names {
  char text[64] = {};
  constexpr Names() = default;
  template <size_t n>
  constexpr Names(const char (&names)[n]) {
    for (size_t i = 0; i < n; i++) text[i] = names[i];
  }
  // The position of a name, or that behind the last one.
  size_t find(std::string_view name) const {
    size_t at = 0;
    std::string_view rest(text);
    for (; !rest.empty(); at++) {
      const std::string_view first = rest.substr(0, rest.find(' '));
      if (first == name) return at;
      rest.remove_prefix(std::min(first.size() + 1, rest.size()));
    }
    return at;
  }
};

template <class A, size_t... i>
void check(PyObject* const* arguments, std::index_sequence<i...>) {
  const bool may_miss[] = {is_optional<std::decay_t<std::tuple_element_t<i, A>>>..., true};
  for (size_t at = 0; at < sizeof...(i); at++)
    TORCH_CHECK_TYPE(arguments[at] || may_miss[at], "a required argument is missing");
}

template <auto f, bool has_self, Names names>
PyObject* entry(PyObject* self, PyObject* const* given, Py_ssize_t count, PyObject* keywords) {
  using S = Signature<decltype(+f)>;
  constexpr size_t first = has_self ? 1 : 0;
  PyObject* arguments[S::count + 1] = {};
  try {
    if constexpr (has_self) arguments[0] = self;
    TORCH_CHECK_TYPE(
        static_cast<size_t>(count) <= S::count - first, "at most ", S::count - first,
        " arguments are expected, not ", count);
    for (Py_ssize_t i = 0; i < count; i++) arguments[first + static_cast<size_t>(i)] = given[i];
    const Py_ssize_t named = keywords ? PyTuple_GET_SIZE(keywords) : 0;
    for (Py_ssize_t i = 0; i < named; i++) {
      const char* name = PyUnicode_AsUTF8(PyTuple_GET_ITEM(keywords, i));
      const size_t at = first + names.find(name);
      TORCH_CHECK_TYPE(
          at < S::count && !arguments[at], "got an unexpected keyword argument '", name, "'");
      arguments[at] = given[count + i];
    }
    check<typename S::Arguments>(arguments, std::make_index_sequence<S::count>());
    return apply<f, typename S::Arguments>(arguments, std::make_index_sequence<S::count>());
  } catch (...) {
    set_error();
    return nullptr;
  }
}

template <auto f, bool has_self = true, Names names = Names{}>
PyMethodDef method(const char* name) {
  auto* function = &entry<f, has_self, names>;
  return {
      name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)),
      METH_FASTCALL | METH_KEYWORDS, nullptr};
}
template <auto f, Names names = Names{}>
PyMethodDef function(const char* name) {
  return method<f, false, names>(name);
}

template <auto f>
PyObject* get(PyObject* self, void*) {
  try {
    PyObject* const arguments[] = {self};
    return apply<f, typename Signature<decltype(+f)>::Arguments>(
        arguments, std::index_sequence<0>());
  } catch (...) {
    set_error();
    return nullptr;
  }
}
template <auto f>
int set(PyObject* self, PyObject* value, void*) {
  try {
    PyObject* const arguments[] = {self, value};
    Py_XDECREF((apply<f, typename Signature<decltype(+f)>::Arguments>(
        arguments, std::index_sequence<0, 1>())));
    return 0;
  } catch (...) {
    set_error();
    return -1;
  }
}
template <auto f>
PyGetSetDef property(const char* name) {
  return {name, get<f>, nullptr, nullptr, nullptr};
}
template <auto f, auto g>
PyGetSetDef property(const char* name) {
  return {name, get<f>, set<g>, nullptr, nullptr};
}

template <class T>
void destroy(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  reinterpret_cast<Object<T>*>(self)->value.~T();
  type->tp_free(self);
  Py_DECREF(type);
}

// What tells two objects over pointers apart: where they point to.
template <class T>
const void* identity(const T& value) {
  if constexpr (requires { value.get(); }) return value.get();
  else return nullptr;
}

template <class T>
PyObject* compare(PyObject* a, PyObject* b, int operation) {
  if ((operation != Py_EQ && operation != Py_NE) || !PyObject_TypeCheck(b, type_of<T>))
    Py_RETURN_NOTIMPLEMENTED;
  const void* one = identity(reinterpret_cast<Object<T>*>(a)->value);
  const bool same = a == b || (one && one == identity(reinterpret_cast<Object<T>*>(b)->value));
  return PyBool_FromLong(same == (operation == Py_EQ));
}
template <class T>
Py_hash_t hash(PyObject* self) {
  const void* found = identity(reinterpret_cast<Object<T>*>(self)->value);
  return static_cast<Py_hash_t>(reinterpret_cast<intptr_t>(found ? found : self) >> 4);
}

// Makes the type of the objects over T. The tables live for ever.
template <class T>
void add_type(
    PyObject* module, const char* name, std::vector<PyMethodDef> methods,
    std::vector<PyGetSetDef> properties) {
  auto* table = new std::vector<PyMethodDef>(std::move(methods));
  auto* members = new std::vector<PyGetSetDef>(std::move(properties));
  table->push_back({});
  members->push_back({});
  PyType_Slot slots[] = {
      {Py_tp_dealloc, reinterpret_cast<void*>(&destroy<T>)},
      {Py_tp_richcompare, reinterpret_cast<void*>(&compare<T>)},
      {Py_tp_hash, reinterpret_cast<void*>(&hash<T>)},
      {Py_tp_methods, table->data()},
      {Py_tp_getset, members->data()},
      {0, nullptr}};
  const std::string full = std::string("_neuron.") + name;
  PyType_Spec spec = {
      intern(full), sizeof(Object<T>), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
      slots};
  Ref type(PyType_FromSpec(&spec));
  type_of<T> = reinterpret_cast<PyTypeObject*>(type.get());
  if (PyModule_AddObjectRef(module, name, type.get()) < 0) Ref::throw_set();
  type.release();
}

// Calls a function of Python.
Ref call_with(PyObject* function, const Ref& arguments, PyObject* keywords = nullptr);
template <class... A>
Ref call(PyObject* function, const A&... arguments) {
  return call_with(function, Ref(tuple(arguments...)));
}
template <class... A>
Ref call_method(PyObject* object, const char* name, const A&... arguments) {
  const Ref function(PyObject_GetAttrString(object, name));
  return call(function.get(), arguments...);
}

} // namespace neuron::bind

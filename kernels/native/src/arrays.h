// Checked views of the arrays that Python passes.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "ops.h"

namespace octavo {

namespace nb = nanobind;
using In = nb::ndarray<nb::ro>;
using Out = nb::ndarray<>;

template <typename T> struct View {
  T* data;
  std::vector<int64_t> shape, stride;  // in elements

  int64_t rows() const { return shape[0]; }
  int64_t last() const { return shape.back(); }
};

[[noreturn]] inline void refuse(const char* name, const std::string& why) {
  throw std::invalid_argument(std::string(name) + ": " + why);
}

// A view of `ndim` axes (0: any number) of type T with a contiguous last axis.
template <typename T, typename Array> View<T> view(const Array& array, const char* name, size_t ndim) {
  if (array.dtype() != nb::dtype<std::remove_const_t<T>>()) refuse(name, "wrong element type");
  if (array.device_type() != nb::device::cpu::value) refuse(name, "not in host memory");
  if (ndim ? array.ndim() != ndim : array.ndim() == 0) refuse(name, "wrong number of axes");
  View<T> v{static_cast<T*>(const_cast<void*>(static_cast<const void*>(array.data()))), {}, {}};
  for (size_t i = 0; i < array.ndim(); ++i) {
    v.shape.push_back(static_cast<int64_t>(array.shape(i)));
    v.stride.push_back(array.stride(i));
  }
  if (array.size() > 0 && v.last() > 1 && v.stride.back() != 1) refuse(name, "the last axis is not contiguous");
  return v;
}

// The same, and contiguous altogether.
template <typename T, typename Array> View<T> dense(const Array& array, const char* name, size_t ndim) {
  View<T> v = view<T>(array, name, ndim);
  int64_t expected = 1;
  for (size_t i = v.shape.size(); i-- > 0; expected *= v.shape[i])
    if (array.size() > 0 && v.shape[i] > 1 && v.stride[i] != expected) refuse(name, "not contiguous");
  return v;
}

inline void expect(bool condition, const char* name, const char* why) {
  if (!condition) refuse(name, why);
}

inline Matrix matrix(const View<float>& v) { return {v.data, v.shape[0], v.stride[0]}; }
inline Matrix matrix(const View<const float>& v) { return {const_cast<float*>(v.data), v.shape[0], v.stride[0]}; }

// [T, heads, D] as rows (token, head).
inline Rows head_rows(float* data, const std::vector<int64_t>& stride) { return {data, stride[0], stride[1]}; }

class PySession;  // module.cpp

// Runs the operation without the interpreter lock; arrays that a recorded plan names stay alive with it.
template <typename... Owners>
void submit(Session& session, std::unique_ptr<Op> op, const Owners&... owners) {
  if (session.recording()) (op->keeps.push_back(std::make_shared<Owners>(owners)), ...);
  const nb::gil_scoped_release unlocked;
  session.execute(std::move(op));
}

void bind_weights(nb::module_& module);
void bind_model(nb::module_& module, nb::class_<Session>& session);
void bind_sampling(nb::class_<Session>& session);

}  // namespace octavo

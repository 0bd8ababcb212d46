#pragma once

#include <cmath>

/// A number and its derivative along some direction: loops written for any number give both.
struct Dual {
  double value = 0.0;
  double moved = 0.0;

  Dual() = default;
  Dual(double x, double x_t = 0.0) : value(x), moved(x_t) {}

  friend Dual operator+(Dual a, Dual b) { return {a.value + b.value, a.moved + b.moved}; }
  friend Dual operator-(Dual a, Dual b) { return {a.value - b.value, a.moved - b.moved}; }
  friend Dual operator*(Dual a, Dual b) {
    return {a.value * b.value, a.moved * b.value + a.value * b.moved};
  }
  friend Dual operator/(Dual a, Dual b) {
    const double x = a.value / b.value;
    return {x, (a.moved - x * b.moved) / b.value};
  }
  Dual& operator+=(Dual b) { return *this = *this + b; }

  friend Dual exp(Dual a) { return {std::exp(a.value), std::exp(a.value) * a.moved}; }
  friend Dual log(Dual a) { return {std::log(a.value), a.moved / a.value}; }
  friend Dual tanh(Dual a) {
    const double t = std::tanh(a.value);
    return {t, (1 - t * t) * a.moved};
  }
};

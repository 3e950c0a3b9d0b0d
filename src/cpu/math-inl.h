// Vector functions of the kernels. Included once per target by kernels.cc (no include guard by design of
// foreach_target). Accuracy was checked against double over the whole used domain: tests/cpu/math_test.cc (in the
// 128-bit target).

HWY_BEFORE_NAMESPACE();
namespace octavo::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// exp(x) for x <= 0, relative error below 3e-7. 0 below -87.3 (where the result would be subnormal) and for -inf; NaN
// stays NaN. x = n ln2 + r with |r| <= ln2 / 2, then a degree-6 polynomial of r times 2^n. Adding 1.5 * 2^23 leaves n,
// rounded, in the lowest bits.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V exp_nonpositive(D d, V x) {
  const hn::RebindToSigned<D> di;
  const V magic = hn::Set(d, 12582912.0f);
  const V shifted = hn::MulAdd(x, hn::Set(d, 1.44269504088896341f), magic);
  const V n = hn::Sub(shifted, magic);
  V r = hn::NegMulAdd(n, hn::Set(d, 0.693145751953125f), x);
  r = hn::NegMulAdd(n, hn::Set(d, 1.42860682030941723e-6f), r);
  V p = hn::Set(d, 1.0f / 720.0f);
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 120.0f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 24.0f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 6.0f));
  p = hn::MulAdd(p, r, hn::Set(d, 0.5f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
  p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
  const auto power = hn::Add(hn::ShiftLeft<23>(hn::BitCast(di, shifted)), hn::Set(di, 127 << 23));
  // A NaN passes both: the comparison is false and p is NaN already.
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -87.3f)), hn::Mul(p, hn::BitCast(d, power)));
}

// tanh(x), relative error below 5e-7: a polynomial near 0, where (1 - e) would cancel; (1 - e) / (1 + e), e =
// exp(-2|x|), elsewhere.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V tanh(D d, V x) {
  const V magnitude = hn::Abs(x);
  const V e = exp_nonpositive(d, hn::Mul(magnitude, hn::Set(d, -2.0f)));
  const V one = hn::Set(d, 1.0f);
  const V large = hn::CopySign(hn::Div(hn::Sub(one, e), hn::Add(one, e)), x);
  const V square = hn::Mul(x, x);
  V p = hn::Set(d, 62.0f / 2835.0f);
  p = hn::MulAdd(p, square, hn::Set(d, -17.0f / 315.0f));
  p = hn::MulAdd(p, square, hn::Set(d, 2.0f / 15.0f));
  p = hn::MulAdd(p, square, hn::Set(d, -1.0f / 3.0f));
  const V small = hn::MulAdd(hn::Mul(p, square), x, x);
  return hn::IfThenElse(hn::Lt(magnitude, hn::Set(d, 0.25f)), small, large);
}

}  // namespace octavo::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

// Tokens through a decoder layer, and through the final norm and head: the mathematics of mindllm/models in fp32, for CPUs. A step
// of a few tokens reads every weight once and computes little, so what counts is that nothing else is read and that there are few
// operators. Results of a sequence do not depend on the others of the batch, nor on the number of
// threads: every sum has an order of its own.
//
// The functions have the signature of MindSpore's custom operators of type "aot": pointers and shapes of the inputs, then of
// the outputs. library.py builds them; graphs (native.py) call them, and the host by itself (host.py).

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int kLanes = 16;
constexpr int64_t kWidestHead = 512;

// e^x by range reduction to [-ln2/2, ln2/2] and the polynomial of Cephes' expf, in a form that compilers vectorise.
inline float Exp(float x) {
  x = std::min(std::max(x, -87.0f), 88.0f);
  const float n = std::nearbyintf(x * 1.44269504f);
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) p = p * r + c;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return (p * r * r + r + 1.0f) * power;
}

// Sum of products in kLanes interleaved partial sums, the same for any Rows.
template <int Rows>
inline void Dot(const float *x, const float *w, int64_t size, float *result, int64_t stride) {
  float sums[Rows][kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (int row = 0; row < Rows; ++row) {
#pragma omp simd
      for (int lane = 0; lane < kLanes; ++lane) {
        sums[row][lane] = std::fma(x[row * size + i + lane], w[i + lane], sums[row][lane]);
      }
    }
  }
  for (int row = 0; row < Rows; ++row) {
    for (int half = kLanes / 2; half > 0; half /= 2) {
#pragma omp simd
      for (int lane = 0; lane < half; ++lane) sums[row][lane] += sums[row][lane + half];
    }
    float sum = sums[row][0];
    for (int64_t rest = i; rest < size; ++rest) sum = std::fma(x[row * size + rest], w[rest], sum);
    result[row * stride] = sum;
  }
}

// y [batch, out] = x [batch, in] w^T (+ bias [out], where there is one) with w [out, in]. Ends without a barrier.
void Product(const float *x, const float *w, const float *bias, float *y, int64_t batch, int64_t in, int64_t out) {
#pragma omp for schedule(static) nowait
  for (int64_t n = 0; n < out; ++n) {
    const float *row = w + n * in;
    int64_t b = 0;
    for (; b + 8 <= batch; b += 8) Dot<8>(x + b * in, row, in, y + b * out + n, out);
    for (; b + 4 <= batch; b += 4) Dot<4>(x + b * in, row, in, y + b * out + n, out);
    for (; b < batch; ++b) Dot<1>(x + b * in, row, in, y + b * out + n, out);
    if (bias != nullptr) {
      for (b = 0; b < batch; ++b) y[b * out + n] += bias[n];
    }
  }
}

// A matrix [out, in]: floats, or codes of 4 or 8 bits in groups of columns, W = (table[code] - zero) * scale.
struct Matrix {
  const float *weight = nullptr;
  const uint8_t *codes = nullptr;    // [out, groups, bytes of a group], the first of two codes in the low bits
  const float *scales = nullptr;     // [out, groups]
  const float *zeros = nullptr;      // [out, groups], or none
  const int32_t *places = nullptr;   // [in]: where each column stands among the codes, or none: as it is
  const float *table = nullptr;      // what codes mean; none: the number they are
  int64_t out = 0, in = 0, groups = 1, bytes = 0;
  bool nibbles = false;

  int64_t group() const { return in / groups; }
};

// x [batch, in] in the order in which codes are read: columns as they stand among the codes, and of two codes in a byte those in
// the low bits before those in the high bits, group by group. sums [batch, groups]: those of each group.
void Arrange(const float *x, const Matrix &m, int64_t batch, float *arranged, float *sums) {
  const int64_t group = m.group(), half = group / 2;
  for (int64_t b = 0; b < batch; ++b) {
    float *row = arranged + b * m.in;
    for (int64_t i = 0; i < m.in; ++i) {
      const int64_t place = m.places == nullptr ? i : m.places[i];
      const int64_t first = place / group * group, offset = place - first;
      row[m.nibbles ? first + (offset & 1) * half + offset / 2 : place] = x[b * m.in + i];
    }
    for (int64_t g = 0; g < m.groups; ++g) {
      float sum = 0.0f;
      for (int64_t i = 0; i < group; ++i) sum += row[g * group + i];
      sums[b * m.groups + g] = sum;
    }
  }
}

// kLanes numbers at once, in the vectors of GCC: loops over bytes it does not vectorise well by itself.
typedef float FloatVector __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t IntVector __attribute__((vector_size(kLanes * sizeof(int32_t))));
typedef uint8_t ByteVector __attribute__((vector_size(kLanes)));

template <typename Vector>
inline Vector Load(const void *from) {
  Vector found;
  std::memcpy(&found, from, sizeof found);
  return found;
}

// What codes mean: the numbers they are, one of 16 values, or one of 256.
template <bool Nibbles, bool Table>
inline FloatVector Values(const float *table, ByteVector codes) {
  if (!Table) return __builtin_convertvector(__builtin_convertvector(codes, IntVector), FloatVector);
  if (Nibbles) return __builtin_shuffle(Load<FloatVector>(table), __builtin_convertvector(codes, IntVector));
  FloatVector found;
  for (int lane = 0; lane < kLanes; ++lane) found[lane] = table[codes[lane]];
  return found;
}

template <bool Table>
inline float Value(const float *table, int code) {
  return Table ? table[code] : static_cast<float>(code);
}

// Products of `Rows` arranged rows with row n of a matrix in codes: group by group, scaled when a group is summed up.
template <int Rows, bool Nibbles, bool Table>
inline void DotCodes(const float *x, const float *x_sums, const Matrix &m, int64_t n, float *result, int64_t stride) {
  const int64_t group = m.group(), half = group / 2;
  FloatVector totals[Rows] = {};
  float corrections[Rows] = {};
  for (int64_t g = 0; g < m.groups; ++g) {
    const uint8_t *codes = m.codes + (n * m.groups + g) * m.bytes;
    const float *from = x + g * group;
    FloatVector sums[Rows] = {};
    int64_t i = 0;
    for (; i + kLanes <= m.bytes; i += kLanes) {
      const ByteVector bytes = Load<ByteVector>(codes + i);
      const FloatVector low = Values<Nibbles, Table>(m.table, Nibbles ? bytes & 15 : bytes);
      for (int row = 0; row < Rows; ++row) sums[row] += Load<FloatVector>(from + row * m.in + i) * low;
      if (!Nibbles) continue;
      const FloatVector high = Values<Nibbles, Table>(m.table, bytes >> 4);
      for (int row = 0; row < Rows; ++row) sums[row] += Load<FloatVector>(from + row * m.in + half + i) * high;
    }
    for (; i < m.bytes; ++i) {
      const float low = Value<Table>(m.table, Nibbles ? codes[i] & 15 : codes[i]);
      const float high = Nibbles ? Value<Table>(m.table, codes[i] >> 4) : 0.0f;
      for (int row = 0; row < Rows; ++row) {
        const float *at = from + row * m.in + i;
        sums[row][i % kLanes] += at[0] * low;
        if (Nibbles) sums[row][i % kLanes] += at[half] * high;
      }
    }
    const float scale = m.scales[n * m.groups + g];
    const float zero = m.zeros == nullptr ? 0.0f : m.zeros[n * m.groups + g] * scale;
    for (int row = 0; row < Rows; ++row) {
      totals[row] += scale * sums[row];
      corrections[row] = std::fma(zero, x_sums[row * m.groups + g], corrections[row]);
    }
  }
  for (int row = 0; row < Rows; ++row) {
    float total = 0.0f;
    for (int lane = 0; lane < kLanes; ++lane) total += totals[row][lane];
    result[row * stride] = total - corrections[row];
  }
}

template <bool Nibbles, bool Table>
void ProductCodes(const float *x, const float *sums, const Matrix &m, const float *bias, float *y, int64_t batch) {
#pragma omp for schedule(static) nowait
  for (int64_t n = 0; n < m.out; ++n) {
    int64_t b = 0;
    const auto at = [&](int64_t row) { return x + row * m.in; };
    const auto sums_at = [&](int64_t row) { return sums + row * m.groups; };
    for (; b + 4 <= batch; b += 4) DotCodes<4, Nibbles, Table>(at(b), sums_at(b), m, n, y + b * m.out + n, m.out);
    for (; b < batch; ++b) DotCodes<1, Nibbles, Table>(at(b), sums_at(b), m, n, y + b * m.out + n, m.out);
    if (bias != nullptr) {
      for (b = 0; b < batch; ++b) y[b * m.out + n] += bias[n];
    }
  }
}

// The same as Product above of a matrix in either form. Each thread arranges the input for itself: that takes one part in as many
// as there are rows for it, and no barrier.
void Product(const float *x, const Matrix &m, const float *bias, float *y, int64_t batch) {
  if (m.codes == nullptr) return Product(x, m.weight, bias, y, batch, m.in, m.out);
  static thread_local std::vector<float> scratch;
  scratch.resize(batch * (m.in + m.groups));
  float *arranged = scratch.data(), *sums = arranged + batch * m.in;
  Arrange(x, m, batch, arranged, sums);
  if (m.nibbles && m.table != nullptr) return ProductCodes<true, true>(arranged, sums, m, bias, y, batch);
  if (m.nibbles) return ProductCodes<true, false>(arranged, sums, m, bias, y, batch);
  if (m.table != nullptr) return ProductCodes<false, true>(arranged, sums, m, bias, y, batch);
  ProductCodes<false, false>(arranged, sums, m, bias, y, batch);
}

// What a layer has beside its weights: eps of the norms, scale of the scores, what is added to the weights of norms (0, or 1 for
// those stored around zero), and whether the gate is the tanh form of GELU instead of SiLU.
struct Numbers {
  float eps, scale, plus, gelu;
};

// Root-mean-square norm of a row.
void NormRow(const float *row, const float *weight, const Numbers &numbers, float *y, int64_t size) {
  float squares;
  Dot<1>(row, row, size, &squares, 1);
  const float scale = 1.0f / std::sqrt(squares / static_cast<float>(size) + numbers.eps);
  for (int64_t i = 0; i < size; ++i) y[i] = row[i] * scale * (weight[i] + numbers.plus);
}

// The same of each row of x [batch, size].
void Norm(const float *x, const float *weight, const Numbers &numbers, float *y, int64_t batch, int64_t size) {
#pragma omp for schedule(static)
  for (int64_t b = 0; b < batch; ++b) NormRow(x + b * size, weight, numbers, y + b * size, size);
}

// x · sigmoid(a): SiLU with a = x; the tanh form of GELU with a = 2 sqrt(2 / pi) (x + 0.044715 x^3), as 1 + tanh(u) = 2 sigmoid(2u).
inline float Gate(float x, bool gelu) {
  const float a = gelu ? 1.59576912f * (x + 0.044715f * x * x * x) : x;
  return x / (1.0f + Exp(-a));
}

void Add(const float *x, float *y, int64_t size) {
#pragma omp for schedule(static)
  for (int64_t i = 0; i < size; ++i) y[i] += x[i];
}

// Rotary embedding of one head in the half-split layout.
void Rotate(const float *x, const float *cos, const float *sin, float *y, int64_t width) {
  const int64_t half = width / 2;
  for (int64_t i = 0; i < half; ++i) {
    y[i] = x[i] * cos[i] - x[i + half] * sin[i];
    y[i + half] = x[i + half] * cos[i + half] + x[i] * sin[i + half];
  }
}

// The same of a head that goes through a norm before, where there is one.
void NormedAndRotated(const float *x, const float *norm, const Numbers &numbers, const float *cos, const float *sin, float *y,
                      int64_t width) {
  if (norm == nullptr) return Rotate(x, cos, sin, y, width);
  float normed[kWidestHead];
  NormRow(x, norm, numbers, normed, width);
  Rotate(normed, cos, sin, y, width);
}

// Attention of one scaled query to `count` keys and values; `weights` is scratch for as many numbers.
void Attend(const float *query, const float *keys, const float *values, int64_t count, int64_t width, float *weights,
            float *context) {
  float largest = -INFINITY;
  for (int64_t t = 0; t < count; ++t) {
    Dot<1>(query, keys + t * width, width, weights + t, 1);
    largest = std::max(largest, weights[t]);
  }
#pragma omp simd
  for (int64_t t = 0; t < count; ++t) weights[t] = Exp(weights[t] - largest);
  float total = 0.0f, sums[kWidestHead] = {};
  for (int64_t t = 0; t < count; ++t) {
    total += weights[t];
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) sums[i] = std::fma(weights[t], values[t * width + i], sums[i]);
  }
  for (int64_t i = 0; i < width; ++i) context[i] = sums[i] / total;
}

const float *Floats(void *pointer) { return static_cast<const float *>(pointer); }

// An input that a layer may not have: then one number stands in its place.
const float *Optional(void *pointer, const int64_t *shape) { return shape[0] > 1 ? Floats(pointer) : nullptr; }

constexpr int kWithoutCodes = 23;  // inputs and output of a layer whose matrices are floats
constexpr int kTable = 22;         // where what codes mean stands; behind it three tensors for each matrix

// Input `index`, the one that is the `which`-th matrix of a layer: floats [out, in], or codes [out, groups, bytes].
Matrix MatrixAt(int index, int which, int count, void **params, const int *dimensions, int64_t **shapes) {
  Matrix m;
  m.out = shapes[index][0];
  if (count == kWithoutCodes || dimensions[index] == 2) {
    m.in = shapes[index][1];
    m.weight = Floats(params[index]);
    return m;
  }
  const int own = kTable + 1 + 3 * which;
  m.codes = static_cast<const uint8_t *>(params[index]);
  m.groups = shapes[index][1];
  m.bytes = shapes[index][2];
  m.scales = Floats(params[own]);
  m.zeros = dimensions[own + 1] > 1 ? Floats(params[own + 1]) : nullptr;
  m.places = shapes[own + 2][0] > 1 ? static_cast<const int32_t *>(params[own + 2]) : nullptr;
  const int64_t kinds = shapes[kTable][0];  // 16 or 256 values, or with one more the numbers themselves
  m.nibbles = kinds <= 17;
  m.table = kinds % 2 == 0 ? Floats(params[kTable]) : nullptr;
  m.in = m.groups * m.bytes * (m.nibbles ? 2 : 1);
  return m;
}

// Inputs: x [batch, hidden], cos and sin [batch, d], positions int32 [batch], numbers [4], attention norm, wq, wk, wv, wo, ffn
// norm, w1, w3, w2, keys and values [sequences * kv_heads * capacity, d], which get the new tokens; biases of wq, wk, wv, wo and
// norms of query and key heads [d], or [1] for what there is not. Where matrices are in codes, further: what codes mean, and scales,
// zeros and places of columns of each of the seven, or [1]. Output: x after the layer.
//
// Rows of x are tokens: one of each sequence, or all of the only sequence, each of which sees those before it.
int Layer(int count, void **params, const int *dimensions, int64_t **shapes, bool of_one_sequence) {
  const float *x = Floats(params[0]), *cos = Floats(params[1]), *sin = Floats(params[2]);
  const int32_t *positions = static_cast<const int32_t *>(params[3]);
  const float *given = Floats(params[4]);
  const Numbers numbers{given[0], given[1], given[2], given[3]};
  const float *attention_norm = Floats(params[5]), *ffn_norm = Floats(params[10]);
  const auto matrix = [&](int index, int which) { return MatrixAt(index, which, count, params, dimensions, shapes); };
  const Matrix wq = matrix(6, 0), wk = matrix(7, 1), wv = matrix(8, 2), wo = matrix(9, 3);
  const Matrix w1 = matrix(11, 4), w3 = matrix(12, 5), w2 = matrix(13, 6);
  float *keys = static_cast<float *>(params[14]), *values = static_cast<float *>(params[15]);
  const float *bq = Optional(params[16], shapes[16]), *bk = Optional(params[17], shapes[17]);
  const float *bv = Optional(params[18], shapes[18]), *bo = Optional(params[19], shapes[19]);
  const float *query_norm = Optional(params[20], shapes[20]), *key_norm = Optional(params[21], shapes[21]);
  float *y = static_cast<float *>(params[count - 1]);

  const int64_t batch = shapes[0][0], hidden = shapes[0][1], width = shapes[14][1];
  const int64_t query_size = wq.out, key_size = wk.out, inner = w1.out;
  const int64_t heads = query_size / width, kv_heads = key_size / width, group = heads / kv_heads;
  const int64_t capacity = shapes[14][0] / ((of_one_sequence ? 1 : batch) * kv_heads);
  if (width > kWidestHead) return 1;
  for (int64_t b = 0; b < batch; ++b) {
    if (positions[b] < 0 || positions[b] >= capacity) return 2;
  }

  static thread_local std::vector<float> scratch;
  scratch.resize(batch * (2 * hidden + 2 * query_size + 2 * key_size + 2 * inner));
  float *normed = scratch.data(), *middle = normed + batch * hidden, *query = middle + batch * hidden;
  float *context = query + batch * query_size, *key = context + batch * query_size, *value = key + batch * key_size;
  float *gate = value + batch * key_size, *up = gate + batch * inner;
  const auto place_of = [&](int64_t b, int64_t n) { return ((of_one_sequence ? 0 : b) * kv_heads + n) * capacity * width; };

#pragma omp parallel
  {
    Norm(x, attention_norm, numbers, normed, batch, hidden);
    Product(normed, wq, bq, query, batch);
    Product(normed, wk, bk, key, batch);
    Product(normed, wv, bv, value, batch);
#pragma omp barrier
#pragma omp for collapse(2) schedule(static)
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t n = 0; n < kv_heads; ++n) {
        const int64_t place = place_of(b, n) + positions[b] * width;
        NormedAndRotated(key + b * key_size + n * width, key_norm, numbers, cos + b * width, sin + b * width, keys + place,
                         width);
        std::memcpy(values + place, value + b * key_size + n * width, width * sizeof(float));
      }
    }
#pragma omp for collapse(2) schedule(static, 1)
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t n = 0; n < kv_heads; ++n) {
        static thread_local std::vector<float> weights;
        weights.resize(capacity);
        const int64_t place = place_of(b, n);
        for (int64_t head = n * group; head < (n + 1) * group; ++head) {
          float rotated[kWidestHead];
          NormedAndRotated(query + b * query_size + head * width, query_norm, numbers, cos + b * width, sin + b * width,
                           rotated, width);
          for (int64_t i = 0; i < width; ++i) rotated[i] *= numbers.scale;
          Attend(rotated, keys + place, values + place, positions[b] + 1, width, weights.data(),
                 context + b * query_size + head * width);
        }
      }
    }
    Product(context, wo, bo, middle, batch);
#pragma omp barrier
    Add(x, middle, batch * hidden);
    Norm(middle, ffn_norm, numbers, normed, batch, hidden);
    Product(normed, w1, nullptr, gate, batch);
    Product(normed, w3, nullptr, up, batch);
#pragma omp barrier
#pragma omp for collapse(2) schedule(static)
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t i = 0; i < inner; ++i) {
        float &g = gate[b * inner + i];
        g = Gate(g, numbers.gelu != 0.0f) * up[b * inner + i];
      }
    }
    Product(gate, w2, nullptr, y, batch);
#pragma omp barrier
    Add(middle, y, batch * hidden);
  }
  return 0;
}

}  // namespace

// A layer for one token of each sequence.
extern "C" int decode_layer(int count, void **params, int *dimensions, int64_t **shapes, const char **, void *, void *) {
  return Layer(count, params, dimensions, shapes, false);
}

// A layer for tokens of one sequence, whose keys and values are the cache.
extern "C" int prefill_layer(int count, void **params, int *dimensions, int64_t **shapes, const char **, void *, void *) {
  return Layer(count, params, dimensions, shapes, true);
}

// Inputs: x [batch, hidden], numbers [4], norm, head [vocab, hidden]. Output: logits [batch, vocab].
extern "C" int decode_head(int, void **params, int *, int64_t **shapes, const char **, void *, void *) {
  const int64_t batch = shapes[0][0], hidden = shapes[0][1], vocab = shapes[3][0];
  const float *given = Floats(params[1]);
  const Numbers numbers{given[0], given[1], given[2], given[3]};
  static thread_local std::vector<float> scratch;
  scratch.resize(batch * hidden);
  float *normed = scratch.data();
#pragma omp parallel
  {
    Norm(Floats(params[0]), Floats(params[2]), numbers, normed, batch, hidden);
    Product(normed, Floats(params[3]), nullptr, static_cast<float *>(params[4]), batch, hidden, vocab);
  }
  return 0;
}

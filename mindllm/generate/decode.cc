// One token per sequence through a decoder layer, and through the final norm and head: the mathematics of mindllm/models in
// fp32, for CPUs. A step of a few tokens reads every weight once and computes little, so what counts is that nothing else is
// read and that there are few operators. Results of a sequence do not depend on the others of the batch, nor on the number of
// threads: every sum has an order of its own.
//
// The functions have the signature of MindSpore's custom operators of type "aot": pointers and shapes of the inputs, then of
// the outputs. native.py builds them and is their only caller.

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

// y [batch, out] = x [batch, in] w^T with w [out, in]. Ends without a barrier.
void Product(const float *x, const float *w, float *y, int64_t batch, int64_t in, int64_t out) {
#pragma omp for schedule(static) nowait
  for (int64_t n = 0; n < out; ++n) {
    const float *row = w + n * in;
    int64_t b = 0;
    for (; b + 8 <= batch; b += 8) Dot<8>(x + b * in, row, in, y + b * out + n, out);
    for (; b + 4 <= batch; b += 4) Dot<4>(x + b * in, row, in, y + b * out + n, out);
    for (; b < batch; ++b) Dot<1>(x + b * in, row, in, y + b * out + n, out);
  }
}

// Root-mean-square norm of each row of x [batch, size].
void Norm(const float *x, const float *weight, float *y, int64_t batch, int64_t size, float eps) {
#pragma omp for schedule(static)
  for (int64_t b = 0; b < batch; ++b) {
    const float *row = x + b * size;
    float squares;
    Dot<1>(row, row, size, &squares, 1);
    const float scale = 1.0f / std::sqrt(squares / static_cast<float>(size) + eps);
    for (int64_t i = 0; i < size; ++i) y[b * size + i] = row[i] * scale * weight[i];
  }
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

}  // namespace

// Inputs: x [batch, hidden], cos and sin [batch, d], positions int32 [batch], eps [1], attention norm, wq, wk, wv, wo, ffn norm,
// w1, w3, w2, keys and values [batch * kv_heads * capacity, d], which get the new token. Output: x after the layer.
extern "C" int decode_layer(int, void **params, int *, int64_t **shapes, const char **, void *, void *) {
  const float *x = Floats(params[0]), *cos = Floats(params[1]), *sin = Floats(params[2]);
  const int32_t *positions = static_cast<const int32_t *>(params[3]);
  const float eps = *Floats(params[4]);
  const float *attention_norm = Floats(params[5]), *wq = Floats(params[6]), *wk = Floats(params[7]), *wv = Floats(params[8]);
  const float *wo = Floats(params[9]), *ffn_norm = Floats(params[10]);
  const float *w1 = Floats(params[11]), *w3 = Floats(params[12]), *w2 = Floats(params[13]);
  float *keys = static_cast<float *>(params[14]), *values = static_cast<float *>(params[15]);
  float *y = static_cast<float *>(params[16]);

  const int64_t batch = shapes[0][0], hidden = shapes[0][1], width = shapes[14][1];
  const int64_t query_size = shapes[6][0], key_size = shapes[7][0], inner = shapes[11][0];
  const int64_t heads = query_size / width, kv_heads = key_size / width, group = heads / kv_heads;
  const int64_t capacity = shapes[14][0] / (batch * kv_heads);
  if (width > kWidestHead) return 1;
  for (int64_t b = 0; b < batch; ++b) {
    if (positions[b] < 0 || positions[b] >= capacity) return 2;
  }
  const float scale = 1.0f / std::sqrt(static_cast<float>(width));

  static thread_local std::vector<float> scratch;
  scratch.resize(batch * (2 * hidden + 2 * query_size + 2 * key_size + 2 * inner + heads * capacity));
  float *normed = scratch.data(), *middle = normed + batch * hidden, *query = middle + batch * hidden;
  float *context = query + batch * query_size, *key = context + batch * query_size, *value = key + batch * key_size;
  float *gate = value + batch * key_size, *up = gate + batch * inner, *weights = up + batch * inner;

#pragma omp parallel
  {
    Norm(x, attention_norm, normed, batch, hidden, eps);
    Product(normed, wq, query, batch, hidden, query_size);
    Product(normed, wk, key, batch, hidden, key_size);
    Product(normed, wv, value, batch, hidden, key_size);
#pragma omp barrier
#pragma omp for collapse(2) schedule(static)
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t n = 0; n < kv_heads; ++n) {
        float *its_keys = keys + (b * kv_heads + n) * capacity * width, *its_values = values + (its_keys - keys);
        const int64_t position = positions[b];
        Rotate(key + b * key_size + n * width, cos + b * width, sin + b * width, its_keys + position * width, width);
        std::memcpy(its_values + position * width, value + b * key_size + n * width, width * sizeof(float));
        for (int64_t head = n * group; head < (n + 1) * group; ++head) {
          float rotated[kWidestHead];
          Rotate(query + b * query_size + head * width, cos + b * width, sin + b * width, rotated, width);
          for (int64_t i = 0; i < width; ++i) rotated[i] *= scale;
          Attend(rotated, its_keys, its_values, position + 1, width, weights + (b * heads + head) * capacity,
                 context + b * query_size + head * width);
        }
      }
    }
    Product(context, wo, middle, batch, query_size, hidden);
#pragma omp barrier
    Add(x, middle, batch * hidden);
    Norm(middle, ffn_norm, normed, batch, hidden, eps);
    Product(normed, w1, gate, batch, hidden, inner);
    Product(normed, w3, up, batch, hidden, inner);
#pragma omp barrier
#pragma omp for collapse(2) schedule(static)
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t i = 0; i < inner; ++i) {
        float &g = gate[b * inner + i];
        g = g / (1.0f + Exp(-g)) * up[b * inner + i];
      }
    }
    Product(gate, w2, y, batch, inner, hidden);
#pragma omp barrier
    Add(middle, y, batch * hidden);
  }
  return 0;
}

// Inputs: x [batch, hidden], eps [1], norm, head [vocab, hidden]. Output: logits [batch, vocab].
extern "C" int decode_head(int, void **params, int *, int64_t **shapes, const char **, void *, void *) {
  const int64_t batch = shapes[0][0], hidden = shapes[0][1], vocab = shapes[3][0];
  static thread_local std::vector<float> scratch;
  scratch.resize(batch * hidden);
  float *normed = scratch.data();
#pragma omp parallel
  {
    Norm(Floats(params[0]), Floats(params[2]), normed, batch, hidden, *Floats(params[1]));
    Product(normed, Floats(params[3]), static_cast<float *>(params[4]), batch, hidden, vocab);
  }
  return 0;
}

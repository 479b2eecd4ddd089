#include <cmath>
#include <map>
#include <stdexcept>
#include <test/parity/models.h>

#include <torch/nn.h>

namespace ddp::parity {
namespace {

namespace nn = torch::nn;

nn::Linear linear(std::int64_t in, std::int64_t out, at::ScalarType dtype) {
  nn::Linear layer(in, out);
  layer->to(dtype);
  return layer;
}

class WithSpare : public Model {
 protected:
  void add_spare(bool with_spare, std::int64_t width, at::ScalarType dtype = at::kFloat) {
    if (with_spare) {
      spare_ = register_module("spare", linear(width, width, dtype));
    }
  }
  torch::Tensor maybe_spare(const torch::Tensor& hidden, bool use_spare) {
    return use_spare ? hidden + spare_->forward(hidden) : hidden;
  }

 private:
  nn::Linear spare_ = nullptr;
};

class Mlp : public WithSpare {
 public:
  explicit Mlp(bool with_spare) {
    first_ = register_module("first", nn::Linear(12, 32));
    add_spare(with_spare, 32);
    second_ = register_module("second", nn::Linear(32, 32));
    third_ = register_module("third", nn::Linear(32, 32));
    last_ = register_module("last", nn::Linear(32, 4));
  }

  torch::Tensor forward(torch::Tensor x, bool use_spare) override {
    x = maybe_spare(torch::relu(first_(x)), use_spare);
    x = torch::relu(second_(x));
    x = torch::relu(third_(x));
    return last_(x);
  }

  torch::Tensor loss(const torch::Tensor& output, const torch::Tensor& target) const override {
    return torch::mse_loss(output, target);
  }

 private:
  nn::Linear first_ = nullptr, second_ = nullptr, third_ = nullptr, last_ = nullptr;
};

class Convolutional : public WithSpare {
 public:
  explicit Convolutional(bool with_spare) {
    conv1_ = register_module("conv1", nn::Conv2d(nn::Conv2dOptions(1, 8, 3).bias(false)));
    add_spare(with_spare, 6);
    norm1_ = register_module("norm1", nn::BatchNorm2d(8));
    conv2_ = register_module("conv2", nn::Conv2d(nn::Conv2dOptions(8, 16, 3).bias(false)));
    norm2_ = register_module("norm2", nn::BatchNorm2d(16));
    last_ = register_module("last", nn::Linear(64, 5));
  }

  torch::Tensor forward(torch::Tensor x, bool use_spare) override {
    x = maybe_spare(conv1_(x), use_spare);
    x = torch::relu(norm1_(x));
    x = torch::relu(norm2_(conv2_(x)));
    x = torch::max_pool2d(x, 2);
    return last_(torch::flatten(x, 1));
  }

  torch::Tensor loss(const torch::Tensor& output, const torch::Tensor& target) const override {
    return torch::cross_entropy_loss(output, target);
  }

 private:
  nn::Conv2d conv1_ = nullptr, conv2_ = nullptr;
  nn::BatchNorm2d norm1_ = nullptr, norm2_ = nullptr;
  nn::Linear last_ = nullptr;
};

class Lstm : public WithSpare {
 public:
  explicit Lstm(bool with_spare) {
    lstm_ =
        register_module("lstm", nn::LSTM(nn::LSTMOptions(8, 16).num_layers(2).batch_first(true)));
    add_spare(with_spare, 16);
    last_ = register_module("last", nn::Linear(16, 3));
  }

  torch::Tensor forward(torch::Tensor x, bool use_spare) override {
    x = std::get<0>(lstm_(x)).select(1, -1);
    return last_(maybe_spare(x, use_spare));
  }

  torch::Tensor loss(const torch::Tensor& output, const torch::Tensor& target) const override {
    return torch::mse_loss(output, target);
  }

 private:
  nn::LSTM lstm_ = nullptr;
  nn::Linear last_ = nullptr;
};

class EncoderLayerImpl : public nn::Module {
 public:
  static constexpr std::int64_t kHeads = 2;

  EncoderLayerImpl(std::int64_t width, std::int64_t inner) {
    norm1_ = register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({width})));
    query_key_value_ = register_module("query_key_value", nn::Linear(width, 3 * width));
    projection_ = register_module("projection", nn::Linear(width, width));
    norm2_ = register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({width})));
    inner_ = register_module("inner", nn::Linear(width, inner));
    outer_ = register_module("outer", nn::Linear(inner, width));
  }

  torch::Tensor forward(torch::Tensor x) {
    const auto batch = x.size(0);
    const auto length = x.size(1);
    const auto width = x.size(2);
    const auto each = width / kHeads;
    const auto parts = query_key_value_(norm1_(x))
                           .view({batch, length, 3, kHeads, each})
                           .permute({2, 0, 3, 1, 4})
                           .unbind(0);
    const auto scores = torch::matmul(parts[0], parts[1].transpose(-2, -1)) *
                        (1.0 / std::sqrt(static_cast<double>(each)));
    const auto mixed = torch::matmul(torch::softmax(scores, -1), parts[2]);
    x = x + projection_(mixed.transpose(1, 2).reshape({batch, length, width}));
    return x + outer_(torch::gelu(inner_(norm2_(x))));
  }

 private:
  nn::LayerNorm norm1_ = nullptr, norm2_ = nullptr;
  nn::Linear query_key_value_ = nullptr, projection_ = nullptr, inner_ = nullptr, outer_ = nullptr;
};
TORCH_MODULE(EncoderLayer);

class Transformer : public WithSpare {
 public:
  explicit Transformer(bool with_spare) {
    position_ = register_parameter("position", torch::randn({6, 16}) * 0.1);
    embedding_ = register_module("embedding", nn::Embedding(20, 16));
    add_spare(with_spare, 16);
    layers_ = register_module("layers", nn::ModuleList(EncoderLayer(16, 32), EncoderLayer(16, 32)));
    norm_ = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({16})));
    last_ = register_module("last", nn::Linear(16, 20));
  }

  torch::Tensor forward(torch::Tensor x, bool use_spare) override {
    x = maybe_spare(embedding_(x) + position_, use_spare);
    for (const auto& layer : *layers_) {
      x = layer->as<EncoderLayer>()->forward(x);
    }
    return last_(norm_(x)).flatten(0, 1);
  }

  torch::Tensor loss(const torch::Tensor& output, const torch::Tensor& target) const override {
    return torch::cross_entropy_loss(output, target);
  }

 private:
  torch::Tensor position_;
  nn::Embedding embedding_ = nullptr;
  nn::ModuleList layers_ = nullptr;
  nn::LayerNorm norm_ = nullptr;
  nn::Linear last_ = nullptr;
};

/// A linear layer whose weight is another layer's, and is registered here too.
class TiedLinearImpl : public nn::Module {
 public:
  explicit TiedLinearImpl(const torch::Tensor& weight) {
    weight_ = register_parameter("weight", weight);
    bias_ = register_parameter("bias", torch::zeros({weight.size(0)}));
  }

  torch::Tensor forward(const torch::Tensor& x) {
    return torch::nn::functional::linear(x, weight_, bias_);
  }

 private:
  torch::Tensor weight_, bias_;
};
TORCH_MODULE(TiedLinear);

class Tied : public WithSpare {
 public:
  explicit Tied(bool with_spare) {
    embedding_ = register_module("embedding", nn::Embedding(20, 16));
    add_spare(with_spare, 16);
    recurrent_ = register_module("recurrent", nn::GRU(nn::GRUOptions(16, 16).batch_first(true)));
    output_ = register_module("output", TiedLinear(embedding_->weight));
  }

  torch::Tensor forward(torch::Tensor x, bool use_spare) override {
    x = std::get<0>(recurrent_(embedding_(x)));
    return output_(maybe_spare(x, use_spare)).flatten(0, 1);
  }

  torch::Tensor loss(const torch::Tensor& output, const torch::Tensor& target) const override {
    return torch::cross_entropy_loss(output, target);
  }

 private:
  nn::Embedding embedding_ = nullptr;
  nn::GRU recurrent_ = nullptr;
  TiedLinear output_ = nullptr;
};

class Sparse : public WithSpare {
 public:
  explicit Sparse(bool with_spare) {
    first_ = register_module("first", nn::Linear(12, 16));
    add_spare(with_spare, 16);
    embedding_ =
        register_module("embedding", nn::Embedding(nn::EmbeddingOptions(12, 16).sparse(true)));
    last_ = register_module("last", nn::Linear(16, 12));
  }

  torch::Tensor forward(torch::Tensor x, bool use_spare) override {
    const auto words = embedding_(x);
    x = maybe_spare(torch::relu(first_(torch::one_hot(x, 12).to(words.scalar_type()))), use_spare);
    return last_(torch::relu(x + words)).flatten(0, 1);
  }

  torch::Tensor loss(const torch::Tensor& output, const torch::Tensor& target) const override {
    return torch::cross_entropy_loss(output, target);
  }

 private:
  nn::Linear first_ = nullptr, last_ = nullptr;
  nn::Embedding embedding_ = nullptr;
};

class MixedDtypes : public WithSpare {
 public:
  explicit MixedDtypes(bool with_spare) {
    first_ = register_module("first", nn::Linear(12, 32));
    add_spare(with_spare, 32);
    narrow_ = register_module("narrow", linear(32, 32, at::kHalf));
    wide_ = register_module("wide", linear(32, 32, at::kDouble));
    brain_ = register_module("brain", linear(32, 32, at::kBFloat16));
    last_ = register_module("last", nn::Linear(32, 4));
  }

  torch::Tensor forward(torch::Tensor x, bool use_spare) override {
    x = maybe_spare(torch::tanh(first_(x)), use_spare);
    x = torch::tanh(narrow_(x.to(at::kHalf)));
    x = torch::tanh(wide_(x.to(at::kDouble)));
    x = torch::tanh(brain_(x.to(at::kBFloat16)));
    return last_(x.to(at::kFloat));
  }

  torch::Tensor loss(const torch::Tensor& output, const torch::Tensor& target) const override {
    return torch::mse_loss(output, target);
  }

 private:
  nn::Linear first_ = nullptr, narrow_ = nullptr, wide_ = nullptr, brain_ = nullptr,
             last_ = nullptr;
};

class Complex : public WithSpare {
 public:
  explicit Complex(bool with_spare) {
    first_ = register_module("first", linear(6, 16, at::kComplexFloat));
    add_spare(with_spare, 16, at::kComplexFloat);
    second_ = register_module("second", linear(16, 16, at::kComplexFloat));
    last_ = register_module("last", linear(16, 3, at::kComplexFloat));
  }

  torch::Tensor forward(torch::Tensor x, bool use_spare) override {
    x = first_(x);
    x = maybe_spare(x / (1 + x.abs()), use_spare);
    x = second_(x);
    return last_(x / (1 + x.abs()));
  }

  torch::Tensor loss(const torch::Tensor& output, const torch::Tensor& target) const override {
    return (output - target).abs().square().mean();
  }

 private:
  nn::Linear first_ = nullptr, second_ = nullptr, last_ = nullptr;
};

template <class M>
std::shared_ptr<Model> make(bool with_spare) {
  return std::make_shared<M>(with_spare);
}

}  // namespace

std::shared_ptr<Model> make_model(const std::string& name, bool with_spare) {
  using Maker = std::shared_ptr<Model> (*)(bool);
  static const std::map<std::string, Maker> kMakers{
      {"mlp", make<Mlp>},
      {"convolutional", make<Convolutional>},
      {"lstm", make<Lstm>},
      {"transformer", make<Transformer>},
      {"tied", make<Tied>},
      {"sparse", make<Sparse>},
      {"mixed_dtypes", make<MixedDtypes>},
      {"complex", make<Complex>},
  };
  const auto maker = kMakers.find(name);
  if (maker == kMakers.end()) {
    throw std::invalid_argument("there is no model " + name);
  }
  return maker->second(with_spare);
}

}  // namespace ddp::parity

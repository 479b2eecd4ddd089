#include <cmath>
#include <stdexcept>
#include <test/parity/models.h>

#include <torch/nn.h>

namespace ddp::parity {
namespace {

namespace nn = torch::nn;

class WithSpare : public Model {
 protected:
  void add_spare(bool with_spare, std::int64_t width) {
    if (with_spare) {
      spare_ = register_module("spare", nn::Linear(width, width));
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

}  // namespace

std::shared_ptr<Model> make_model(const std::string& name, bool with_spare) {
  if (name == "mlp") {
    return std::make_shared<Mlp>(with_spare);
  }
  if (name == "convolutional") {
    return std::make_shared<Convolutional>(with_spare);
  }
  if (name == "lstm") {
    return std::make_shared<Lstm>(with_spare);
  }
  if (name == "transformer") {
    return std::make_shared<Transformer>(with_spare);
  }
  throw std::invalid_argument("there is no model " + name);
}

}  // namespace ddp::parity

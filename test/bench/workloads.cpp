#include <stdexcept>
#include <test/bench/workloads.h>
#include <utility>

namespace ddp::bench {
namespace {

namespace nn = torch::nn;

/// `count` square layers, each with a ReLU after it.
struct LayersImpl : Net {
  LayersImpl(int count, int width) {
    for (int i = 0; i < count; ++i) {
      layers->push_back(nn::Linear(width, width));
      layers->push_back(nn::ReLU());
    }
    register_module("layers", layers);
  }
  at::Tensor forward(const at::Tensor& input) override { return layers->forward(input); }
  nn::Sequential layers;
};

nn::Conv2d convolution(int from, int to, int size, int stride) {
  return nn::Conv2d(nn::Conv2dOptions(from, to, size).stride(stride).padding(size / 2).bias(false));
}

struct BottleneckImpl : nn::Module {
  BottleneckImpl(int from, int width, int stride)
      : body(convolution(from, width, 1, 1), nn::BatchNorm2d(width), nn::ReLU(),
             convolution(width, width, 3, stride), nn::BatchNorm2d(width), nn::ReLU(),
             convolution(width, 4 * width, 1, 1), nn::BatchNorm2d(4 * width)) {
    register_module("body", body);
    if (stride != 1 || from != 4 * width) {
      shortcut =
          nn::Sequential(convolution(from, 4 * width, 1, stride), nn::BatchNorm2d(4 * width));
      register_module("shortcut", shortcut);
    }
  }
  at::Tensor forward(const at::Tensor& input) {
    return torch::relu(body->forward(input) +
                       (shortcut.is_empty() ? input : shortcut->forward(input)));
  }
  nn::Sequential body;
  nn::Sequential shortcut{nullptr};
};
TORCH_MODULE(Bottleneck);

struct ResNet50Impl : Net {
  ResNet50Impl() {
    body->push_back(convolution(3, 64, 7, 2));
    body->push_back(nn::BatchNorm2d(64));
    body->push_back(nn::ReLU());
    int from = 64;
    const std::pair<int, int> stages[] = {{64, 3}, {128, 4}, {256, 6}, {512, 3}};
    for (const auto& [width, blocks] : stages) {
      for (int block = 0; block < blocks; ++block) {
        body->push_back(Bottleneck(from, width, block == 0 && width > 64 ? 2 : 1));
        from = 4 * width;
      }
    }
    register_module("body", body);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& input) override {
    return head(body->forward(input).mean({2, 3}));
  }
  nn::Sequential body;
  nn::Linear head{2048, 1000};
};

struct TransformerImpl : Net {
  TransformerImpl() { register_module("encoder", encoder); }
  at::Tensor forward(const at::Tensor& input) override { return encoder(input); }
  nn::TransformerEncoder encoder{nn::TransformerEncoderOptions(
      nn::TransformerEncoderLayerOptions(512, 8).dim_feedforward(2048).dropout(0), 4)};
};

/// The MNIST sample's model.
struct DigitsImpl : Net {
  DigitsImpl() {
    register_module("body", body);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& input) override {
    return head->forward(body->forward(input).flatten(1));
  }
  nn::Sequential body{convolution(1, 16, 3, 1),  nn::BatchNorm2d(16), nn::ReLU(), nn::MaxPool2d(2),
                      convolution(16, 32, 3, 1), nn::BatchNorm2d(32), nn::ReLU(), nn::MaxPool2d(2)};
  nn::Sequential head{nn::Linear(32 * 7 * 7, 64), nn::ReLU(), nn::Linear(64, 10)};
};

struct WordsImpl : Net {
  WordsImpl() {
    register_module("words", words);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& input) override { return head(words(input).mean(1)); }
  nn::Embedding words{nn::EmbeddingOptions(100000, 64).sparse(true)};
  nn::Linear head{64, 64};
};

}  // namespace

Workload make_workload(const std::string& name) {
  Workload work;
  if (name == "mlp" || name == "deep") {
    const bool deep = name == "deep";
    const int width = deep ? 32 : 1024;
    const int batch = deep ? 8 : 32;
    work.model = std::make_shared<LayersImpl>(deep ? 400 : 12, width);
    work.input = torch::randn({batch, width});
    work.target = torch::randn({batch, width});
  } else if (name == "resnet50") {
    work.model = std::make_shared<ResNet50Impl>();
    work.input = torch::randn({4, 3, 32, 32});
    work.target = torch::randn({4, 1000});
  } else if (name == "transformer") {
    work.model = std::make_shared<TransformerImpl>();
    work.input = torch::randn({32, 2, 512});
    work.target = torch::randn({32, 2, 512});
  } else if (name == "digits") {
    work.model = std::make_shared<DigitsImpl>();
    work.input = torch::randn({64, 1, 28, 28});
    work.target = torch::randn({64, 10});
  } else if (name == "embedding") {
    work.model = std::make_shared<WordsImpl>();
    work.input = torch::randint(100000, {64, 16});
    work.target = torch::randn({64, 64});
  } else {
    throw std::invalid_argument("no workload " + name);
  }
  work.sparse.assign(work.model->parameters().size(), false);
  if (name == "embedding") {
    work.sparse[0] = true;
  }
  return work;
}

}  // namespace ddp::bench

#include "contract/match.h"

#include <exception>

#include "contract/message.h"
#include "contract/tensors.h"
#include "contract/views.h"

namespace octavo::contract {
namespace {

using Presence = Expectation::Presence;
using TensorCheck = std::string (*)(const Problem&, const Tensor&, const TensorView&, const Expectation&);

template <TensorCheck check>
std::string each_tensor(const Problem& problem, const Arguments& arguments) {
  for (const Tensor& row : tensors()) {
    const Expectation expected = row.expectation(problem);
    if (expected.presence == Presence::kIgnored) continue;
    if (std::string text = check(problem, row, row.view(arguments), expected); !text.empty()) return text;
  }
  return {};
}

constexpr const char* kAdvice = "; a plan serves the calls that validate() reduces to its Problem, make another one";

std::string presence(const Problem&, const Tensor& row, const TensorView& view, const Expectation& expected) {
  const bool needed = expected.presence == Presence::kNeeded;
  if (view.present() == needed) return {};
  return cat(row.name, ": the plan was made for a call ", needed ? "with" : "without", " it, got ",
             needed ? "none" : "one", kAdvice);
}

std::string type(const Problem&, const Tensor& row, const TensorView& view, const Expectation& expected) {
  if (!view.present() || view.type == expected.type) return {};
  return cat(row.name, ": the plan was made for ", name(expected.type), ", got ", name(view.type), kAdvice);
}

std::string shape(const Problem&, const Tensor& row, const TensorView& view, const Expectation& expected) {
  if (!view.present() || same_shape(view, expected.shape)) return {};
  return cat(row.name, ": the plan was made for shape ", shape_text(expected.shape), ", got ", shape_text(view),
             kAdvice);
}

std::string memory(const Problem& problem, const Tensor& row, const TensorView& view, const Expectation&) {
  if (!view.present()) return {};
  for (const auto check : {check_pointer, check_alignment, check_contiguous, check_cache_strides}) {
    if (std::string text = check(row, view); !text.empty()) return text;
  }
  if (row.is_cache && !problem.has(Feature::kStridedCache) && !is_contiguous(view)) {
    return cat(row.name, ": the plan was made for contiguous caches, got a strided one", kAdvice);
  }
  return {};
}

constexpr MatchRule kRules[] = {
    {"R1", "run() gets the tensors that the plan was made for, no more and no fewer.", each_tensor<presence>},
    {"R2", "They have the element types of the plan.", each_tensor<type>},
    {"R3", "They have the shapes of the plan.", each_tensor<shape>},
    {"R4", "Their pointers and strides keep V4 to V7, and a plan for contiguous caches gets contiguous caches.",
     each_tensor<memory>},
};

}  // namespace

std::span<const MatchRule> match_rules() noexcept {
  return kRules;
}

Status check_match(const Problem& problem, const Arguments& arguments) noexcept {
  try {
    for (const MatchRule& rule : kRules) {
      std::string text = rule.check(problem, arguments);
      if (!text.empty()) return Status::invalid_argument(cat(text, " [", rule.id, "]"));
    }
    return {};
  } catch (const std::exception&) {  // a message that could not be allocated
    return out_of_memory();
  }
}

}  // namespace octavo::contract

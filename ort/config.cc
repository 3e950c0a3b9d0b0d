#include "ort/config.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <limits>
#include <optional>
#include <string_view>
#include <thread>

namespace octavo::ort {
namespace {

// The value of a session config entry, nothing where the session has none.
Status read_entry(const OrtApi& api, const OrtSessionOptions* options, const char* key,
                  std::optional<std::string>& value) {
  int exists = 0;
  Status status = from_ort_status(api, api.HasSessionConfigEntry(options, key, &exists), key);
  if (!status.ok() || exists == 0) return status;
  std::size_t size = 0;
  status = from_ort_status(api, api.GetSessionConfigEntry(options, key, nullptr, &size), key);
  if (!status.ok()) return status;
  std::string text(size, '\0');
  status = from_ort_status(api, api.GetSessionConfigEntry(options, key, text.data(), &size), key);
  if (!status.ok()) return status;
  text.resize(std::char_traits<char>::length(text.c_str()));  // the size counts the terminating zero
  value = std::move(text);
  return {};
}

Status read_positive(const OrtApi& api, const OrtSessionOptions* options, const char* key, std::int64_t largest,
                     std::int64_t& number) {
  std::optional<std::string> text;
  Status status = read_entry(api, options, key, text);
  if (!status.ok() || !text) return status;
  std::int64_t parsed = 0;
  const char* end = text->data() + text->size();
  const auto result = std::from_chars(text->data(), end, parsed);
  if (result.ec != std::errc{} || result.ptr != end || parsed < 1 || parsed > largest) {
    return Status::invalid_argument(std::string("session config entry ") + key + " must be a whole number from 1 to " +
                                    std::to_string(largest) + ", got \"" + *text +
                                    "\"; correct it, or leave it out for the default");
  }
  number = parsed;
  return {};
}

// The switch by which ONNX Runtime's own attention kernels say what they take, with the values that it understands.
constexpr const char* kStockSwitch = "ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO";

Status read_explain(const OrtApi& api, const OrtSessionOptions* options, bool& explain) {
  constexpr const char* kEntry = "octavo.explain";
  std::optional<std::string> text;
  Status status = read_entry(api, options, kEntry, text);
  if (!status.ok()) return status;
  if (text) {
    if (*text != "0" && *text != "1") {
      return Status::invalid_argument(std::string("session config entry ") + kEntry +
                                      " must be \"0\" or \"1\", got \"" + *text +
                                      "\"; correct it, or leave it out for \"0\"");
    }
    explain = *text == "1";
    return {};
  }
  const char* value = std::getenv(kStockSwitch);
  const std::string_view set = value == nullptr ? "" : value;
  explain = set == "1" || set == "true" || set == "True";
  if (explain || set.empty() || set == "0" || set == "false" || set == "False") return {};
  return Status::invalid_argument(std::string("environment variable ") + kStockSwitch +
                                  " must be \"0\" or \"1\", got \"" + std::string(set) + "\"; correct it, or unset it");
}

}  // namespace

Status read_config(const OrtApi& api, const OrtSessionOptions* options, Config& config) {
  config = Config();
  std::optional<std::string> text;
  Status status = read_entry(api, options, "octavo.backend", text);
  if (!status.ok()) return status;
  config.backend = text.value_or("");

  status = read_positive(api, options, "octavo.output_qk_limit_bytes", std::numeric_limits<std::int64_t>::max(),
                         config.output_qk_limit_bytes);
  if (!status.ok()) return status;

  std::int64_t concurrency = std::max(1u, std::thread::hardware_concurrency());
  status = read_positive(api, options, "octavo.concurrency", 4096, concurrency);
  if (!status.ok()) return status;
  config.concurrency = static_cast<int>(concurrency);

  return read_explain(api, options, config.explain);
}

}  // namespace octavo::ort

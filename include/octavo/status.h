// Status: how every octavo call reports failure. Nothing that is noexcept throws; explain() and to_string() can run out
// of memory.
#pragma once

#include <string>
#include <string_view>
#include <utility>

namespace octavo {

enum class StatusCode {
  kOk = 0,
  kInvalidArgument,    // the caller's arguments break a rule of the contract; nothing was written
  kUnsupported,        // legal, but no backend of this build on this device takes it; the message says why for each
  kResourceExhausted,  // a size limit (output_qk, workspace) would be exceeded
  kInternal,           // a device or executor failure
};

// Code and message. The message names the input, the rule, what was got and what to do.
class [[nodiscard]] Status {
 public:
  Status() noexcept = default;
  Status(StatusCode code, std::string message) noexcept : code_(code), message_(std::move(message)) {}

  static Status invalid_argument(std::string message) noexcept {
    return {StatusCode::kInvalidArgument, std::move(message)};
  }

  bool ok() const noexcept { return code_ == StatusCode::kOk; }
  StatusCode code() const noexcept { return code_; }
  const std::string& message() const noexcept { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

}  // namespace octavo

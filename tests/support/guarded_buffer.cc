#include "support/guarded_buffer.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace octavo::testing {
namespace {

constexpr std::size_t kGuardBytes = 128;
constexpr std::size_t kCacheLine = 64;
constexpr std::byte kGuard{0xA5};

}  // namespace

GuardedBuffer::GuardedBuffer(std::size_t bytes, std::size_t alignment)
    : storage_(bytes + 2 * kGuardBytes + kCacheLine + alignment, kGuard), bytes_(bytes) {
  const auto base = reinterpret_cast<std::uintptr_t>(storage_.data()) + kGuardBytes;
  start_ = kGuardBytes + (kCacheLine - base % kCacheLine) % kCacheLine + alignment;  // off the cache line on purpose
  set_guards_accessible(false);
}

GuardedBuffer::~GuardedBuffer() {
  set_guards_accessible(true);
}

void GuardedBuffer::set_guards_accessible([[maybe_unused]] bool accessible) const {
#if defined(__SANITIZE_ADDRESS__)
  if (storage_.empty()) return;
  const std::byte* end = data() + bytes_;
  const auto after = static_cast<std::size_t>(storage_.data() + storage_.size() - end);
  if (accessible) {
    ASAN_UNPOISON_MEMORY_REGION(storage_.data(), start_);
    ASAN_UNPOISON_MEMORY_REGION(end, after);
  } else {
    ASAN_POISON_MEMORY_REGION(storage_.data(), start_);
    ASAN_POISON_MEMORY_REGION(end, after);
  }
#endif
}

bool GuardedBuffer::equals(const std::vector<std::byte>& bytes) const {
  return std::equal(bytes.begin(), bytes.end(), data(), data() + bytes_);
}

void GuardedBuffer::restore(const std::vector<std::byte>& bytes) {
  if (!bytes.empty()) std::memcpy(data(), bytes.data(), std::min(bytes.size(), bytes_));
}

bool GuardedBuffer::intact() const {
  set_guards_accessible(true);
  const auto is_guard = [](std::byte b) { return b == kGuard; };
  const auto end = storage_.begin() + static_cast<std::ptrdiff_t>(start_ + bytes_);
  const bool result = std::all_of(storage_.begin(), storage_.begin() + static_cast<std::ptrdiff_t>(start_), is_guard) &&
                      std::all_of(end, storage_.end(), is_guard);
  set_guards_accessible(false);
  return result;
}

}  // namespace octavo::testing

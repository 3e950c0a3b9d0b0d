// GuardedBuffer: memory for one tensor between two guard zones. Writes into the guards are found by intact(); under
// AddressSanitizer reads of them are faults.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace octavo::testing {

class GuardedBuffer {
 public:
  GuardedBuffer() = default;
  // `alignment` is the element's: the data start is aligned to that and to nothing more.
  GuardedBuffer(std::size_t bytes, std::size_t alignment);
  ~GuardedBuffer();
  GuardedBuffer(GuardedBuffer&&) noexcept = default;
  GuardedBuffer& operator=(GuardedBuffer&&) = delete;
  GuardedBuffer(const GuardedBuffer&) = delete;
  GuardedBuffer& operator=(const GuardedBuffer&) = delete;

  std::byte* data() { return storage_.data() + start_; }
  const std::byte* data() const { return storage_.data() + start_; }
  std::size_t size() const { return bytes_; }
  template <typename T>
  T* as() {
    return reinterpret_cast<T*>(data());
  }
  template <typename T>
  const T* as() const {
    return reinterpret_cast<const T*>(data());
  }

  std::vector<std::byte> copy() const { return {data(), data() + bytes_}; }
  bool equals(const std::vector<std::byte>& bytes) const;
  void restore(const std::vector<std::byte>& bytes);
  bool intact() const;

 private:
  void set_guards_accessible(bool accessible) const;

  std::vector<std::byte> storage_;
  std::size_t start_ = 0;
  std::size_t bytes_ = 0;
};

}  // namespace octavo::testing

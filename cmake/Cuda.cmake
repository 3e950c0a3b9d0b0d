# OCTAVO_CUDA adds the CUDA backends. The CUDA runtime is linked statically and finds the driver when it is first used, so
# that the library loads, and refuses CUDA with a sentence, where there is no GPU.
option(OCTAVO_CUDA "Build the CUDA backends (needs nvcc)" OFF)
# Machine code for sm_80 (8.x) and sm_90a, PTX for whatever comes later.
set(OCTAVO_CUDA_GENCODE "arch=compute_80,code=[sm_80,compute_80];arch=compute_90a,code=sm_90a" CACHE STRING
    "nvcc -gencode arguments, one for each target")

if(OCTAVO_CUDA)
  set(CMAKE_CUDA_ARCHITECTURES OFF)
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  enable_language(CUDA)
  # CMake before 3.26 does not know that nvcc 12 and later speak C++20.
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
  endif()
  set(CMAKE_CUDA_STANDARD 20)
  find_package(CUDAToolkit REQUIRED)
endif()

# Finds libtorch and defines weft::libtorch. WEFT_TORCH (cache variable or environment) names the folder that holds
# include/ and lib/: the `torch` folder of a wheel, or an unpacked libtorch. Own imported target instead of
# find_package(Torch), whose CMake files demand a CUDA toolkit even for CPU use of the wheel.
set(WEFT_TORCH "$ENV{WEFT_TORCH}" CACHE PATH "Folder of libtorch >= 2.11 (holds include/ and lib/)")
if(NOT WEFT_TORCH)
  message(FATAL_ERROR "libtorch not found: WEFT_TORCH is empty. Run `make setup`, set WEFT_TORCH to a libtorch >= 2.11, "
                      "or build the planner alone with -DWEFT_WITH_TORCH=OFF.")
endif()
foreach(needed include/torch/csrc/distributed/c10d/Backend.hpp include/torch/csrc/api/include/torch/nn/module.h
               lib/libtorch_cpu.so lib/libc10.so)
  if(NOT EXISTS "${WEFT_TORCH}/${needed}")
    message(FATAL_ERROR "WEFT_TORCH=${WEFT_TORCH} is no usable libtorch: ${needed} is missing "
                        "(Weft needs headers, libtorch_cpu and distributed support).")
  endif()
endforeach()
file(STRINGS "${WEFT_TORCH}/include/torch/headeronly/version.h" version_lines REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
foreach(part MAJOR MINOR PATCH)
  string(REGEX MATCH "TORCH_VERSION_${part} ([0-9]+)" unused "${version_lines}")
  set(torch_${part} ${CMAKE_MATCH_1})
endforeach()
set(WEFT_TORCH_VERSION "${torch_MAJOR}.${torch_MINOR}.${torch_PATCH}")
if(WEFT_TORCH_VERSION VERSION_LESS 2.11)
  message(FATAL_ERROR "WEFT_TORCH=${WEFT_TORCH} is libtorch ${WEFT_TORCH_VERSION}; Weft needs 2.11 or newer.")
endif()
message(STATUS "libtorch ${WEFT_TORCH_VERSION} in ${WEFT_TORCH}")

# libtorch ships the headers of its own fmt, without the library: the installed fmt's must be found before them.
find_path(WEFT_FMT_INCLUDE fmt/format.h NO_CMAKE_PACKAGE_REGISTRY)
file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/headers_first)
file(CREATE_LINK ${WEFT_FMT_INCLUDE}/fmt ${PROJECT_BINARY_DIR}/headers_first/fmt SYMBOLIC)

add_library(weft_libtorch INTERFACE)
add_library(weft::libtorch ALIAS weft_libtorch)
target_include_directories(weft_libtorch SYSTEM INTERFACE
  ${PROJECT_BINARY_DIR}/headers_first ${WEFT_TORCH}/include ${WEFT_TORCH}/include/torch/csrc/api/include
  ${PROJECT_SOURCE_DIR}/cmake/gloo_headers)
# NDEBUG always: the library was built with it, and class layouts differ without (RecordFunction::inputs).
target_compile_definitions(weft_libtorch INTERFACE USE_DISTRIBUTED USE_C10D USE_C10D_GLOO NDEBUG)
target_link_libraries(weft_libtorch INTERFACE ${WEFT_TORCH}/lib/libtorch_cpu.so ${WEFT_TORCH}/lib/libc10.so)
target_link_options(weft_libtorch INTERFACE "-Wl,-rpath,${WEFT_TORCH}/lib")

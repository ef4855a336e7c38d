# Sources of a target that use libtorch: they share a precompiled header (11 s a file become 4) and are compiled three at a time,
# since the header leaves seconds of templates to each compilation. Sources without the header are compiled by themselves.
function(weft_torch_sources target)
  target_precompile_headers(${target} REUSE_FROM weft_pch)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 3)
endfunction()

# weft_folder(NAME [TORCH] [DEPENDS folder...] [LIBS target...])
#   One static library per folder of src/weft, from all its .cc files. TORCH: links libtorch and uses the shared
#   precompiled header. DEPENDS: other folders, which must stand above this one in docs/architecture.md's list.
function(weft_folder name)
  cmake_parse_arguments(arg "TORCH" "" "DEPENDS;LIBS" ${ARGN})
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${name}/*.cc)
  list(TRANSFORM arg_DEPENDS PREPEND weft_)
  if(sources)
    add_library(weft_${name} STATIC ${sources})
    set(scope PUBLIC)
    if(arg_TORCH)
      weft_torch_sources(weft_${name})
    endif()
  else()
    add_library(weft_${name} INTERFACE)
    set(scope INTERFACE)
  endif()
  target_include_directories(weft_${name} ${scope} ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(weft_${name} ${scope} ${arg_DEPENDS} ${arg_LIBS})
  if(arg_TORCH)
    target_link_libraries(weft_${name} ${scope} weft::libtorch)
  endif()
endfunction()

# Tests spend their time in the library, and compiling them is most of `make test`: they are not optimised (the last -O
# counts). The sanitizers' presets keep their own level.
set(WEFT_TEST_OPTIONS $<$<CONFIG:Release>:-O0>)

# CTest entries for the suites of a test program, listed whenever it is linked (DiscoverSuites.cmake).
function(weft_discover_suites target prefix label timeout)
  set(most 12)  # tests in one process: enough to hide its start, few enough to spread over the cores
  set(listed ${CMAKE_CURRENT_BINARY_DIR}/${target}_suites.cmake)
  add_custom_command(TARGET ${target} POST_BUILD BYPRODUCTS ${listed} VERBATIM
    COMMAND ${CMAKE_COMMAND} -D PROGRAM=$<TARGET_FILE:${target}> -D PREFIX=${prefix} -D LABEL=${label} -D TIMEOUT=${timeout}
            -D AT_MOST=${most} -D OUT=${listed} -P ${PROJECT_SOURCE_DIR}/cmake/DiscoverSuites.cmake)
  set_property(TARGET ${target} APPEND PROPERTY LINK_DEPENDS ${PROJECT_SOURCE_DIR}/cmake/DiscoverSuites.cmake)
  set(included ${CMAKE_CURRENT_BINARY_DIR}/${target}_include.cmake)
  file(WRITE ${included} "if(EXISTS [==[${listed}]==])\n  include([==[${listed}]==])\nelse()\n  add_test(${target}_NOT_BUILT ${target}_NOT_BUILT)\nendif()\n")
  set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES ${included})
endfunction()

# weft_test(NAME [TORCH] [ISOLATED] [LIBS target...])
#   One test program from all *_test.cc of tests/NAME, labelled quick; files named *_full_test.cc form a second program
#   labelled full (run by `make test-all` only). TORCH without LIBS links all of Weft and tests/support/ranks.h; with LIBS
#   it links these alone (tests of one rank). ISOLATED: a process for every test, for those that look at the state of theirs.
function(weft_test dir)
  cmake_parse_arguments(arg "TORCH;ISOLATED" "TIMEOUT" "LIBS;DEFINES" ${ARGN})
  if(NOT arg_TIMEOUT)
    set(arg_TIMEOUT 120)
  endif()
  file(GLOB_RECURSE all CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${dir}/*_test.cc)
  string(REPLACE "/" "_" stem ${dir})
  foreach(label quick full)
    set(sources ${all})
    if(label STREQUAL quick)
      list(FILTER sources EXCLUDE REGEX "_full_test\\.cc$")
      set(target test_${stem})
    else()
      list(FILTER sources INCLUDE REGEX "_full_test\\.cc$")
      set(target test_${stem}_full)
    endif()
    if(NOT sources)
      continue()
    endif()
    add_executable(${target} ${sources})
    if(label STREQUAL quick)
      add_dependencies(weft_quick_tests ${target})
    endif()
    if(arg_TORCH)
      if(arg_LIBS)
        target_link_libraries(${target} PRIVATE ${arg_LIBS} GTest::gtest GTest::gmock GTest::gtest_main)
      else()
        target_link_libraries(${target} PRIVATE weft_test_ranks GTest::gtest GTest::gmock)
      endif()
      target_precompile_headers(${target} REUSE_FROM weft_test_pch)
      # As weft_test_pch: a header precompiled without -fPIE is ignored by a program compiled with it (24 s a file, not 6).
      # Three files at a time: a file costs 4 s before its first line (templates that the precompiled header leaves pending).
      set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 3)
    else()
      # stdc++ before gtest: else gtest's uses of std::string pull any object of our archives that holds a copy of them.
      target_link_libraries(${target} PRIVATE ${arg_LIBS} stdc++ GTest::gtest GTest::gmock GTest::gtest_main)
    endif()
    target_compile_options(${target} PRIVATE ${WEFT_TEST_OPTIONS})
    target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR})
    target_compile_definitions(${target} PRIVATE
      WEFT_TEST_DATA="${PROJECT_SOURCE_DIR}/tests/data" WEFT_BINARY="${PROJECT_BINARY_DIR}/bin/weft" ${arg_DEFINES})
    if(arg_TORCH AND NOT arg_ISOLATED)
      weft_discover_suites(${target} "${stem}." ${label} ${arg_TIMEOUT})
    else()
      gtest_discover_tests(${target} TEST_PREFIX "${stem}." DISCOVERY_TIMEOUT 60
                           PROPERTIES LABELS ${label} TIMEOUT ${arg_TIMEOUT})
    endif()
  endforeach()
endfunction()

#include "cuda_stand_in/errors.h"

namespace quern::cuda_stand_in {
namespace {

struct LastError {
    cudaError_t code = cudaSuccess;  // until it is asked for
    cudaError_t described = cudaSuccess;
    std::string message;  // of `described`
};

LastError& last() {
    thread_local LastError error;  // as in the runtime library
    return error;
}

}  // namespace

cudaError_t fail(cudaError_t code, const std::string& message) {
    last() = {code, code, message};
    return code;
}

}  // namespace quern::cuda_stand_in

using quern::cuda_stand_in::last;

cudaError_t cudaGetLastError() {
    const cudaError_t code = last().code;
    last().code = cudaSuccess;
    return code;
}

const char* cudaGetErrorString(cudaError_t code) {
    if (code == cudaSuccess) return "no error";
    return code == last().described ? last().message.c_str() : "an error that the stand-in did not make";
}

const char* cudaGetErrorName(cudaError_t code) { return code == cudaSuccess ? "cudaSuccess" : "stand-in"; }

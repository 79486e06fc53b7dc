// cpp-httplib with the settings that all files must agree on.
#pragma once

#define CPPHTTPLIB_LISTEN_BACKLOG 1024
#define CPPHTTPLIB_FORM_URL_ENCODED_PAYLOAD_MAX_LENGTH 0  // never accepted
#define CPPHTTPLIB_HEADER_MAX_COUNT 64
#define CPPHTTPLIB_TCP_NODELAY true
#define CPPHTTPLIB_ZLIB_SUPPORT  // of request bodies
#include <httplib.h>

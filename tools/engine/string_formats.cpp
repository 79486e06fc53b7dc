#include "tools/engine/string_formats.h"

#include <map>

namespace quern {
namespace {

#define QUERN_DATE                                                                                          \
    "(\\d{4}-((0[13578]|1[02])-(0[1-9]|[12]\\d|3[01])|(0[469]|11)-(0[1-9]|[12]\\d|30)|02-(0[1-9]|1\\d|2[0-" \
    "8]))|"                                                                                                 \
    "(\\d\\d(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29)"
#define QUERN_TIME "([01]\\d|2[0-3]):[0-5]\\d:[0-5]\\d(\\.\\d{1,9})?(Z|[+-]([01]\\d|2[0-3]):[0-5]\\d)"
#define QUERN_LABEL "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
#define QUERN_HOST QUERN_LABEL "(\\." QUERN_LABEL "){0,8}"
#define QUERN_ATOM "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,32}"
#define QUERN_IPV4 "((25[0-5]|2[0-4]\\d|1\\d\\d|[1-9]?\\d)\\.){3}(25[0-5]|2[0-4]\\d|1\\d\\d|[1-9]?\\d)"
#define QUERN_H16 "[0-9a-fA-F]{1,4}"
#define QUERN_URI_CHARACTER "([A-Za-z0-9._~:/?@!$&'()*+,;=-]|%[0-9A-Fa-f]{2})"

}  // namespace

const char* format_regex(const std::string& format) {
    static const std::map<std::string, const char*> kFormats = {
        {"date", QUERN_DATE},
        {"time", QUERN_TIME},
        {"date-time", "(" QUERN_DATE ")T" QUERN_TIME},
        {"duration",
         "P(\\d{1,9}W|(\\d{1,9}Y(\\d{1,9}M(\\d{1,9}D)?)?|\\d{1,9}M(\\d{1,9}D)?|\\d{1,9}D)(T(\\d{1,9}H(\\d{1,"
         "9}M(\\d{1,9}S)?)?|"
         "\\d{1,9}M(\\d{1,9}S)?|\\d{1,9}S))?|T(\\d{1,9}H(\\d{1,9}M(\\d{1,9}S)?)?|\\d{1,9}M(\\d{1,9}S)?|\\d{1,"
         "9}S))"},
        {"email", QUERN_ATOM "(\\." QUERN_ATOM "){0,8}@" QUERN_HOST},
        {"hostname", QUERN_HOST},
        {"uuid", "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"},
        {"ipv4", QUERN_IPV4},
        {"ipv6", "(" QUERN_H16 ":){7}" QUERN_H16 "|(" QUERN_H16 ":){1,7}:|(" QUERN_H16 ":){1,6}:" QUERN_H16
                 "|(" QUERN_H16 ":){1,5}(:" QUERN_H16 "){1,2}|(" QUERN_H16 ":){1,4}(:" QUERN_H16
                 "){1,3}|(" QUERN_H16 ":){1,3}(:" QUERN_H16 "){1,4}|(" QUERN_H16 ":){1,2}(:" QUERN_H16
                 "){1,5}|" QUERN_H16 ":(:" QUERN_H16 "){1,6}|:((:" QUERN_H16 "){1,7}|:)"},
        {"uri", "[A-Za-z][A-Za-z0-9+.-]{0,30}:" QUERN_URI_CHARACTER "+(#" QUERN_URI_CHARACTER "*)?"},
    };
    const auto found = kFormats.find(format);
    return found == kFormats.end() ? nullptr : found->second;
}

}  // namespace quern

# The libraries that quern is linked with, from the archives (.a) of the distribution's development packages, and those
# of its web page, so that the binary runs on machines without them. `make dist` packs the licences of these packages.
set(QUERN_LINKED_PACKAGES libcli11-dev nlohmann-json3-dev)  # used for their headers alone
set(MISSING_FILES "")
set(MISSING_PACKAGES "")

macro(need_file found file package)
  list(APPEND QUERN_LINKED_PACKAGES ${package})
  if(NOT ${found})
    list(APPEND MISSING_FILES ${file})
    list(APPEND MISSING_PACKAGES ${package})
  endif()
endmacro()

# static_library(NAME header package [archive package]...): a target with the header's folder and the archives, the
# ones that need others first.
macro(static_library name header package)
  find_path(${name}_HEADERS ${header})
  need_file(${name}_HEADERS ${header} ${package})
  add_library(${name} INTERFACE)
  set(archives ${ARGN})
  while(archives)
    list(POP_FRONT archives archive archive_package)
    find_library(${name}_${archive} NAMES lib${archive}.a)
    need_file(${name}_${archive} lib${archive}.a ${archive_package})
    target_link_libraries(${name} INTERFACE ${${name}_${archive}})
  endwhile()
  target_include_directories(${name} SYSTEM INTERFACE ${${name}_HEADERS})
endmacro()

static_library(pcre2 pcre2.h libpcre2-dev  pcre2-8 libpcre2-dev)
static_library(utf8proc utf8proc.h libutf8proc-dev  utf8proc libutf8proc-dev)
static_library(libedit histedit.h libedit-dev  edit libedit-dev  tinfo libncurses-dev  bsd libbsd-dev  md libmd-dev)
static_library(zlib zlib.h zlib1g-dev  z zlib1g-dev)
static_library(png png.h libpng-dev  png16 libpng-dev  z zlib1g-dev)
static_library(jpeg jpeglib.h libjpeg-dev  jpeg libjpeg-dev)
static_library(webp webp/decode.h libwebp-dev  webpdemux libwebp-dev  webp libwebp-dev)
# Newer versions of libwebp have a part of it in an archive of its own.
find_library(webp_sharpyuv NAMES libsharpyuv.a)
if(webp_sharpyuv)
  target_link_libraries(webp INTERFACE ${webp_sharpyuv})
endif()
static_library(gif gif_lib.h libgif-dev  gif libgif-dev)
static_library(fmt_headers fmt/format-inl.h libfmt-dev)

# What the server's page uses in the browser; scripts/page_files.cmake embeds it.
macro(page_library found package)  # names that the file has in different versions of the package
  find_file(${found} NAMES ${ARGN} PATHS /usr/share /usr/local/share NO_DEFAULT_PATH)
  need_file(${found} /usr/share/${ARGV2} ${package})
endmacro()

page_library(PAGE_MARKED libjs-marked javascript/marked/marked.umd.min.js javascript/marked/marked.min.js)
page_library(PAGE_PURIFY node-dompurify nodejs/dompurify/dist/purify.es.mjs nodejs/dompurify/dist/purify.es.js)
page_library(PAGE_HIGHLIGHT libjs-highlight.js javascript/highlight.js/highlight.min.js)
page_library(PAGE_KATEX libjs-katex javascript/katex/katex.min.js javascript/katex/katex.js)
page_library(PAGE_KATEX_STYLE libjs-katex javascript/katex/katex.min.css javascript/katex/katex.css)
page_library(PAGE_KATEX_FONT fonts-katex fonts/truetype/katex/KaTeX_Main-Regular.woff2)

if(MISSING_FILES)
  list(REMOVE_DUPLICATES MISSING_PACKAGES)
  list(JOIN MISSING_FILES ", " MISSING_FILES)
  list(JOIN MISSING_PACKAGES " " MISSING_PACKAGES)
  message(FATAL_ERROR "quern: not found: ${MISSING_FILES}. quern takes libraries into its binary. Install them with: "
    "apt-get install ${MISSING_PACKAGES} (or your distribution's packages that have these files)")
endif()
list(REMOVE_DUPLICATES QUERN_LINKED_PACKAGES)
list(JOIN QUERN_LINKED_PACKAGES "\n" QUERN_LINKED_PACKAGES)
file(WRITE ${PROJECT_BINARY_DIR}/linked-packages "${QUERN_LINKED_PACKAGES}\n")  # scripts/dist.sh reads it

# The distributions have no archive of fmt.
add_library(fmt STATIC ${CMAKE_CURRENT_LIST_DIR}/fmt_library.cpp)
target_link_libraries(fmt PUBLIC fmt_headers)

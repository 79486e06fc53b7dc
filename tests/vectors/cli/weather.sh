#!/bin/sh
# A tool for the tests: the weather, whatever is asked.
cat >/dev/null
echo '{"temp_c": 17, "sky": "rainy"}'

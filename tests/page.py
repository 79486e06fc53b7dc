#!/usr/bin/env python3
"""The web page in a real headless Chromium, against the real server with the demo checkpoint: `make test-page`.

Usage: page.py QUERN_BINARY [TEST ...]. Needs chromium and chromedriver on the PATH, else it is skipped (a line that
begins with SKIPPED, exit code 0). With QUERN_SCREENSHOTS=DIR, pictures of the page are left there. Where a test needs
certain words or times, the page's fetch is answered in the browser (Page.model_says); else the answer comes from the
model.
"""
import contextlib
import shutil
import sys

import page_chat
import page_images
import page_look
from browser import Browser, Page, Server


def main():
    missing = [program for program in ("chromium", "chromedriver") if not shutil.which(program)]
    if missing:
        print(f"SKIPPED: no {' and no '.join(missing)} on the PATH; the web page was not tested")
        return 0
    wanted = sys.argv[2:]
    tests = [test for module in (page_chat, page_images, page_look) for name, test in vars(module).items()
             if name.startswith("test_") and (not wanted or name in wanted)]
    failed = 0
    with contextlib.closing(Server(sys.argv[1])) as server, contextlib.closing(Browser()) as browser:
        page = Page(browser, server)
        page.folder = browser.profile
        for test in tests:
            try:
                test(page)
                problems = browser.problems()
                assert not problems, problems
                print("ok     ", test.__name__, flush=True)
            except (AssertionError, RuntimeError, IndexError, KeyError, StopIteration) as error:
                failed += 1
                print("FAILED ", test.__name__, error, flush=True)
    print(f"test cases: {len(tests)} | {len(tests) - failed} passed | {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())

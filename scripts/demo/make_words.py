#!/usr/bin/env python3
"""Writes words.txt: common English words by part of speech, from WordNet 3.0 (Debian package wordnet-base).

Only the bare words are taken (sense-tag counts decide which are common); words.txt is committed, so that
training does not need the package.  usage: make_words.py /usr/share/wordnet > words.txt
"""
import sys
from collections import Counter

KIND = {"1": "noun", "2": "verb", "3": "adj", "5": "adj"}
LIMIT = {"noun": 1500, "verb": 600, "adj": 500}
# Not words one wants a demo to play with: slurs, violence, sex, and capitalised names that lost their capital.
BLOCK = set(
    """negro jew jews jewish bastard rape whore slave slaves nigger sex sexual kill murder corpse bomb suicide shit hell damn damned
    fuck nude naked breast penis vagina drug drugs gun rifle pistol terror nazi anus ass bitch gay lesbian hitler
    tit cock dick christ jesus god devil satan islam muslim christian protestant catholic communism communist
    america american england english french german russian soviet chicago dallas holmes georgia cuba europe mexico
    virginia washington paris york texas boston italy japan china africa asia india london britain british congress
    anode thyroid petitioner polynomial serum kid jap mg cm hr mm kb pa ma c b l p t x fig tsh iodine
    anaconda tsunami thyroglobulin roleplaying collage utopia""".split()
)


def main() -> None:
    counts: Counter = Counter()
    with open(sys.argv[1] + "/cntlist.rev", encoding="ascii") as file:
        for line in file:
            key, _, count = line.split()
            lemma, rest = key.split("%")
            counts[(KIND.get(rest[0], ""), lemma)] += int(count)
    print("# Common English words, selected from WordNet 3.0, Copyright 2006 by Princeton University.")
    print("# THIS SOFTWARE AND DATABASE IS PROVIDED \"AS IS\" AND PRINCETON UNIVERSITY MAKES NO REPRESENTATIONS OR")
    print("# WARRANTIES, EXPRESS OR IMPLIED. Licence: https://wordnet.princeton.edu/license-and-commercial-use")
    for kind, limit in LIMIT.items():
        words = [
            (n, w) for (k, w), n in counts.items() if k == kind and 3 <= len(w) <= 11 and w.isalpha() and w.islower() and w not in BLOCK
        ]
        words.sort(key=lambda pair: (-pair[0], pair[1]))
        print(kind, " ".join(w for _, w in words[:limit]))


if __name__ == "__main__":
    main()

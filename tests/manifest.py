#!/usr/bin/env python3
"""Usage: manifest.py MANIFEST QUERN_BINARY. The manifest is proper YAML, its parts fit together, its flags exist."""
import subprocess
import sys

import yaml

with open(sys.argv[1]) as file:
    parts = {part["kind"]: part for part in yaml.safe_load_all(file)}
pod = parts["StatefulSet"]["spec"]["template"]
container = pod["spec"]["containers"][0]
flags = [arg.split("=")[0] for arg in container["args"] if arg.startswith("-")]
values = dict(arg[2:].split("=") for arg in container["args"] if "=" in arg)
known = subprocess.run([sys.argv[2], "serve", "--help"], capture_output=True, text=True, check=True).stdout
volumes = {v["name"] for v in pod["spec"]["volumes"] + [
    claim["metadata"] for claim in parts["StatefulSet"]["spec"]["volumeClaimTemplates"]]}
checks = {
    "flags exist: " + " ".join(flags): all(flag in known for flag in flags),
    "the service finds the pods": parts["Service"]["spec"]["selector"] == pod["metadata"]["labels"],
    "ports": container["ports"][0]["containerPort"] == int(values["port"]),
    "volumes": {m["name"] for m in container["volumeMounts"]} == volumes,
    "time to drain": pod["spec"]["terminationGracePeriodSeconds"] > int(values["drain-timeout"]) + 60,
}
for what, good in checks.items():
    print("ok     " if good else "FAILED ", what)
sys.exit(not all(checks.values()))

"""A Ray cluster of several nodes on this machine, driven by lines on stdin; ends with its stdin.

usage: python -m tests.launchers.ray_cluster NUM_CPUS...        a node each, the first of which is the head

It prints its address. ``add NUM_CPUS`` adds a node; ``kill`` kills the newest node, its processes included.
"""

import sys

from ray.cluster_utils import Cluster

STORE_BYTES = 80 << 20


def main(*num_cpus: str) -> None:
    """Start the nodes and obey stdin."""
    options = {"object_store_memory": STORE_BYTES}
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": int(num_cpus[0]), "include_dashboard": False, **options}
    )
    nodes = [cluster.add_node(num_cpus=int(each), **options) for each in num_cpus[1:]]
    try:
        cluster.wait_for_nodes()
        print(cluster.address, flush=True)
        for line in sys.stdin:
            command, *rest = line.split()
            if command == "add":
                nodes.append(cluster.add_node(num_cpus=int(rest[0]), **options))
                cluster.wait_for_nodes()
            else:
                cluster.remove_node(nodes.pop(), allow_graceful=False)
            print("done", flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])

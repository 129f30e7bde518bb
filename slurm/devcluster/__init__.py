"""A development cluster of real Slurm daemons on one machine.

Every node is a slurmd in a network namespace of its own, so nodes have host names and addresses, can be killed, and can
be cut from the network as real ones are. Read in this order: settings (what may be chosen), layout (where everything
lies), render (the configuration files), then lifecycle (up and down) and faults (what may go wrong on purpose).
"""

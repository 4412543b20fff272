"""Second opinion on a memory fault: compute-sanitizer names kernel, access, size and address.

A process of its own runs the proof's stored command again, its operands in plain driver allocations, since
compute-sanitizer knows those and their exact sizes. What it finds is told beside the verdict; it neither
makes nor lifts one: it watches other memory at another speed than the proof.
"""

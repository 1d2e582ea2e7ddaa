"""What is done on a machine with a GPU, part by part. Each has a module with ``run(place, record)``.

``run`` records what it finds as it goes, since its process may be stopped at its limit.
"""

"""Tools to test against Rara's wire contract and against faults: scripted peers, a fault proxy, process faults.

`scripted_executor` and `scripted_scheduler` speak any frames, `job_events` builds the events, `auto_executor`
behaves by itself, `fault_proxy` breaks the network between two parts, `processes` starts and signals real ones.
"""

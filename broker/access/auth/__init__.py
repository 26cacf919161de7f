"""ACL 2.0, the access control of RocketMQ 5.3: users, and policies that say what each may do.

`model` has users and policies, as they are stored and as requests have them; `store` keeps them in RocketMQ's RocksDB
databases; `migration` creates them from plain_acl.yml. `users` owns them in memory and changes them. `needs` says which
actions on which resources each request code needs, `rules` finds the entry of a user's policies that decides, and
`authority` authenticates requests for the guard. `handlers` answers the codes 3001 to 3010.
"""

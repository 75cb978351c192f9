-- Hands one message back. KEYS: the lease keys. ARGV: owner, id, 1 if the delivery counts as a strike, 1 if it makes room
-- for a message of a better level, which is counted.
-- Returns 1, or 0 where the lease was no longer the owner's.
local owner, id, strike, is_preempted = ARGV[1], ARGV[2], ARGV[3] == '1', ARGV[4] == '1'
local list = owned_list(id, owner)
if not list then return 0 end
-- first, as a server out of memory refuses a script's first write if that may need more
local problem = put_back(id, list ~= '' and list or nil, is_preempted)
if problem then return {err = problem} end
if not strike then take_back_strike(id) end
return 1

-- Hands one message back.
-- ARGV: owner, id, strike, is_preempted
-- strike: 1 if the delivery counts. is_preempted: 1 if it makes room for a message of a better level, which is counted.
-- Returns 1, or 0 where the lease was no longer the owner's.
local list = owned_list(id, owner)
if not list then return 0 end
-- first, as a server out of memory refuses a script's first write if that may need more
local problem = put_back(id, list ~= '' and list or nil, is_preempted == '1')
if problem then return {err = problem} end
if strike ~= '1' then take_back_strike(id) end
return 1

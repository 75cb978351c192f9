-- Requeues one message.
-- ARGV: owner, id, is_counted, is_preempted, choices
-- is_counted: 1 if the delivery counts. is_preempted: 1 if the message makes room for one of a better priority.
-- choices: how many the message has; '' if its record is right.
-- Result: 1, or 0 if the owner has lost the lease.
local list = owned_list(id, owner)
if not list then return 0 end
-- first, as a server out of memory refuses a script's first write if that may need more
local problem = requeue(id, list ~= '' and list or nil, is_preempted == '1', tonumber(choices))
if problem then return {err = problem} end
if is_counted ~= '1' then uncount_delivery(id) end
return 1

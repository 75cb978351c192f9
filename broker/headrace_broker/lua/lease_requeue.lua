-- Requeues one message.
-- ARGV: owner, id, is_counted, is_preempted, choices
-- id: of the lease. is_counted: 1 if this delivery counts toward the limit. is_preempted: 1 if the message makes room
-- for one of a higher priority. choices: the number of choices to record; '' keeps the recorded one.
-- Result: 1, or 0 if the owner has lost the lease.
local list = owned_list(id, owner)
if not list then return 0 end
-- before `uncount_delivery`: a server out of memory refuses a script whose first write may need memory
local problem = requeue(id, list ~= '' and list or nil, is_preempted == '1', tonumber(choices))
if problem then return {err = problem} end
if is_counted ~= '1' then uncount_delivery(id) end
return 1

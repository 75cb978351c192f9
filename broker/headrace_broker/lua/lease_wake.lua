-- Wakes another worker for the messages that a woken worker has not taken.
-- KEYS: LIST[]
-- LIST: lists of queues.
local queues = {}
for _, list in ipairs(LIST) do
  if not (problem_of(list, 'list') or problem_of(arrived_key(list), 'list')) then return_arrived(list) end
  queues[queue_of(list)] = true
end
for queue in pairs(queues) do update_wake_up(queue) end
